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


def data_flow():
    """Draw loading above and a call below. The plan is made once, and both read it."""
    parts = [text(20, 34, "Once, when a model is loaded", 15, GRAY, "start", "bold")]
    load = [
        ("checkpoint files", "safetensors + config.json"),
        ("canonical NVFP4Tensor", "codes, block and global scales"),
        ("kernel layout", "in the kernel's byte order"),
        ("Flax module", "NVFP4MoE, NVFP4Linear"),
    ]
    call = [
        ("activations", "the user's jitted program"),
        ("op", "ops.moe_mlp"),
        ("XLA custom call", "one FFI target"),
        ("kernel", "sort, GEMM, GEMM, combine"),
    ]
    for row, y in ((load, 50), (call, 270)):
        for i, (name, detail) in enumerate(row):
            x = 20 + i * 236
            parts += [box(x, y, 206, 62), text(x + 103, y + 26, name, 15, INK, "middle", "bold")]
            parts.append(text(x + 103, y + 47, detail, 12, GRAY))
            if i:
                parts.append(arrow(x - 28, y + 31, x - 3, y + 31))
    parts.append(text(20, 254, "In every call, under jax.jit", 15, GRAY, "start", "bold"))
    parts += [
        box(256, 152, 442, 54, FILL_BLUE, BLUE),
        text(477, 175, "Plan: scheme + backend + layout", 15, BLUE, "middle", "bold"),
        text(477, 195, "chosen once, from checkpoint, device, dtype and sizes", 12, BLUE),
        arrow(595, 152, 595, 116),
        arrow(330, 206, 330, 266),
        f'<polyline points="831,112 831,234 430,234 430,266" fill="none" stroke="{INK}" '
        'stroke-width="1.5" marker-end="url(#tip)"/>',
        text(606, 138, "which layout", 12, GRAY, "start"),
        text(320, 226, "which kernel", 12, GRAY, "end"),
        text(820, 226, "weights", 12, GRAY, "end"),
    ]
    return picture(954, 352, "From the files of a checkpoint to the kernel", parts)


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
    for draw in (data_flow, packed_layout):
        (HERE / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
