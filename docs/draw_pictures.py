"""Draw the pictures of the guides: python docs/draw_pictures.py writes docs/pictures/*.svg."""

import pathlib

HERE = pathlib.Path(__file__).parent / "pictures"
INK, GRAY, BLUE, ORANGE = "#1b1f24", "#6e7781", "#0a5ea8", "#b35900"
FILL, FILL_BLUE, FILL_ORANGE = "#f3f5f7", "#d8e8f6", "#fbe3cc"
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def text(x, y, words, size=14, color=INK, anchor="middle", weight="normal"):
    """Return one line of text."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{words}</text>'
    )


def box(x, y, width, height, fill=FILL, stroke=GRAY):
    """Return a rectangle."""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def arrow(x1, y1, x2, y2):
    """Return an arrow."""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def picture(width, height, title, parts):
    """Return a whole picture. Its background is white, so that it can be read on dark pages too."""
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" {FONT}><title>{title}</title>{tip}'
        f'<rect width="{width}" height="{height}" rx="8" fill="white"/>{"".join(parts)}</svg>\n'
    )


def bent_arrow(*points):
    """Return an arrow along several points."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def named_box(x, y, name, detail, width=192, height=56, colors=(FILL, GRAY, INK)):
    """Return a box with a name, and a smaller line below it."""
    fill, stroke, color = colors
    middle = x + width / 2
    return "".join(
        (
            box(x, y, width, height, fill, stroke),
            text(middle, y + 24, name, 15, color, "middle", "bold"),
            text(middle, y + 43, detail, 13, GRAY if color == INK else color),
        )
    )


def data_flow():
    """Draw loading on the left and a call on the right. Both read the plan.

    The picture is narrow, so that a phone shows its text at a size that can be read.
    """
    left, right, step = 26, 282, 84
    top = [46 + row * step for row in range(6)]
    load = (
        ("checkpoint files", "safetensors, config.json"),
        ("canonical NVFP4Tensor", "codes and scales"),
        ("kernel layout", "byte order of the kernel"),
        ("Flax module", "NVFP4MoE, NVFP4Linear"),
    )
    call = (
        ("activations", "of your jitted program"),
        ("op", "ops.moe_mlp"),
        ("XLA custom call", "one FFI target"),
        ("kernel", "sort, GEMM, GEMM, sum"),
    )
    parts = [
        text(left, 30, "Once, at load", 15, GRAY, "start", "bold"),
        text(right, top[2] - 16, "In each call", 15, GRAY, "start", "bold"),
    ]
    for x, first, boxes in ((left, 0, load), (right, 2, call)):
        for row, (name, detail) in enumerate(boxes, first):
            parts.append(named_box(x, top[row], name, detail))
            if row > first:
                parts.append(arrow(x + 96, top[row] - step + 56, x + 96, top[row] - 2))
    plan = top[4] + 14
    parts += [
        box(left, plan, 192, 112, FILL_BLUE, BLUE),
        text(left + 96, plan + 28, "plan", 15, BLUE, "middle", "bold"),
        text(left + 96, plan + 50, "scheme, backend, layout:", 13, BLUE),
        text(left + 96, plan + 68, "chosen once, from checkpoint,", 13, BLUE),
        text(left + 96, plan + 86, "device, dtype and sizes", 13, BLUE),
        bent_arrow((left, plan + 50), (10, plan + 50), (10, top[2] + 28), (left - 2, top[2] + 28)),
        arrow(left + 192, top[3] + 28, right - 2, top[3] + 28),
        text(250, top[3] + 20, "weights", 13, GRAY),
        arrow(left + 192, plan + 20, right - 2, plan + 20),
        text(250, plan + 12, "kernel", 13, GRAY),
        text(16, top[4] + 4, "layout", 13, GRAY, "start"),
    ]
    return picture(490, 540, "From the files of a checkpoint to the kernel", parts)


# The backends of an expert layer in order, and what the picture says about each of them.
CHOICE = {
    "moe_w4a4_sm120": "refuses: needs 12.x",
    "moe_w4a4_sm100": "refuses: needs 10.x",
    "moe_w4a16_sm90": "accepts, and runs",
    "moe_w4a16_sm80": "comes later in the order",
    "moe_w4a16_cpu": "comes later in the order",
    "reference": "accepts everything, and comes last",
}


def choice():
    """Draw the questions that decide the scheme, and the list in which the backend is found."""
    parts = [text(20, 32, "1. The scheme: which numbers are multiplied", 15, INK, "start", "bold")]
    questions = (
        ("Do you request a scheme?", "yes", "that scheme", "no"),
        ("Is the checkpoint W4A4?", "no", "W4A16", "yes"),
        ("Has the GPU FP4 tensor cores?", "no", "W4A16", "yes"),
    )
    for row, (question, side, result, down) in enumerate(questions):
        y = 50 + row * 74
        parts += [
            box(20, y, 250, 42),
            text(145, y + 26, question, 14),
            arrow(270, y + 21, 330, y + 21),
            text(298, y + 14, side, 13, GRAY),
            box(332, y, 128, 42, FILL_BLUE, BLUE),
            text(396, y + 26, result, 15, BLUE, "middle", "bold"),
            arrow(145, y + 42, 145, y + 72),
            text(154, y + 62, down, 13, GRAY, "start"),
        ]
    parts += [
        box(81, 272, 128, 42, FILL_BLUE, BLUE),
        text(145, 298, "W4A4", 15, BLUE, "middle", "bold"),
        text(20, 352, "2. The backend: which kernel multiplies them", 15, INK, "start", "bold"),
        text(20, 374, "The first that accepts scheme, device, dtype and sizes.", 13, GRAY, "start"),
        text(20, 392, "Example: an expert layer in W4A16 on an H200 (9.0).", 13, GRAY, "start"),
    ]
    for row, (name, words) in enumerate(CHOICE.items()):
        y = 406 + row * 40
        chosen = words.startswith("accepts, and")
        fill, stroke, color = (FILL_BLUE, BLUE, BLUE) if chosen else (FILL, GRAY, INK)
        parts += [
            box(20, y, 440, 34, fill, stroke),
            text(32, y + 22, name, 14, color, "start", "bold"),
            text(448, y + 22, words, 13, BLUE if chosen else GRAY, "end"),
        ]
    return picture(480, 656, "How the scheme and the backend of a layer are chosen", parts)


def packed_layout():
    """Draw the weights that lane 1 of a warp multiplies in a tile of 16 x 16, and their bytes."""
    size, left, top = 22, 70, 84
    parts = [
        text(left + 8 * size, 32, "Canonical: rows of the matrix", 15, INK, "middle", "bold"),
        text(left + 8 * size, 54, "what one thread multiplies lies in four places", 12, GRAY),
    ]
    # Lane 4 g + q with g = 0 and q = 1 has rows 0 and 8, columns 2 q and 2 q + 1, and 8 further.
    owned = {(r, c): 2 * (c // 8) + r // 8 for r in (0, 8) for c in (2, 3, 10, 11)}
    for row in range(16):
        for column in range(16):
            register = owned.get((row, column))
            fill = FILL if register is None else (FILL_BLUE, FILL_ORANGE)[register % 2]
            x, y = left + column * size, top + row * size
            parts.append(
                f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{fill}" '
                f'stroke="#c5ccd3"/>'
            )
            if register is not None:
                color = (BLUE, ORANGE)[register % 2]
                parts.append(text(x + size / 2, y + 15, f"r{register}", 11, color))
    parts += [
        text(left - 10, top + 15, "row 0", 11, GRAY, "end"),
        text(left - 10, top + 8 * size + 15, "row 8", 11, GRAY, "end"),
        text(left + 8 * size, top + 16 * size + 22, "16 columns of k, two codes a byte", 12, GRAY),
    ]
    x0 = 520
    parts += [
        text(x0 + 190, 32, "mma_64x64: 16 bytes of one thread", 15, INK, "middle", "bold"),
        text(x0 + 190, 54, "one load brings the registers of 64 columns", 12, GRAY),
        arrow(440, 168, x0 - 12, 168),
    ]
    for step in range(4):
        y = top + 30 + step * 58
        parts.append(text(x0 - 4 + 62, y - 6, f"k = {16 * step} to {16 * step + 15}", 11, GRAY))
        for register in range(4):
            x = x0 + register * 95
            fill, color = ((FILL_BLUE, BLUE), (FILL_ORANGE, ORANGE))[register % 2]
            parts += [box(x, y, 90, 30, fill, color)]
            parts.append(text(x + 45, y + 20, f"register {register}", 12, color))
    parts += [
        text(x0, top + 290, "Registers 0 and 2 hold row 0; 1 and 3 hold row 8.", 12, INK, "start"),
        text(x0, top + 312, "Two steps share two 32-bit words. One rotation", 12, INK, "start"),
        text(x0, top + 330, "and one AND unpack a register.", 12, INK, "start"),
    ]
    return picture(930, 470, "Canonical bytes and the bytes that one thread reads", parts)


def main():
    """Write all pictures."""
    HERE.mkdir(exist_ok=True)
    for draw in (data_flow, choice, packed_layout):
        (HERE / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
