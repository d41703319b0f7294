"""Find measured numbers that stand in a page by hand: `find` returns them.

A measurement is a time, a speed, a ratio of times, or a peak of memory. It belongs into a table or
a figure that ``docs/tables.py`` writes, because a number in a sentence stays when a new run gives
another one. Sizes of models, limits of the code, versions and ids are facts, and may stand in
prose. Blocks of code are left out: they show commands and what these print.
"""

import re

_GENERATED = re.compile(
    r"<!-- (table|figure): [\w.]+ -->.*?<!-- end of \1 -->|<!--.*?-->", re.DOTALL
)
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\([^)]*\)")
_WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|twenty|fifty|a hundred"
# A number with what follows: a unit may stand right behind digits, but not behind a word.
_NUMBER = rf"(?:\d[\d,]*(?:\.\d+)? ?|(?:{_WORDS}|half) )"
_SPAN = rf"\b{_NUMBER}(?:to {_NUMBER})?"
_MORE = r"(?:faster|slower|shorter|longer|quicker|less time|more time|more tokens)"
_LONG = r"(?:fast|quick|quickly|slow|long|much time)"
_OF_SPEED = r"(?:the |a |its )?(?:speed|limit|floor|bound|roofline|peak|rate|time)s?\b"
_EACH = r"(?:/s\b|/sec\b|ps\b| a second| per second| each second)"
_PERCENT = rf"{_SPAN}(?:%|percent)"
_QUANTITIES = (
    # Times: "3 seconds", "20 s", "1.5 us".
    rf"{_SPAN}(?:us|µs|μs|ns|ms|s|seconds?|minutes?|hours?|microseconds?|milliseconds?)\b(?!-)",
    # Speeds.
    rf"{_SPAN}(?:thousand |million )?(?:tokens?|steps?|texts?|calls?){_EACH}",
    rf"{_SPAN}[kMGTP]?(?:i?B|FLOP|FLOPs|OP|OPs){_EACH}",
    rf"{_SPAN}[GTP]FLOPS\b",
    # Ratios of times.
    rf"{_SPAN}x (?:as {_LONG}|{_MORE}|(?:over |of |above )?{_OF_SPEED})",
    rf"(?:{_SPAN}times|\btwice|\bthrice|\bhalf|\ba third|\ba quarter) as {_LONG}\b",
    rf"{_SPAN}times {_MORE}\b",
    rf"{_SPAN}times (?:over |of |above )?(?:the |a |its )?(?:speed|time|floor|roofline)\b",
    rf"{_PERCENT} (?:{_MORE}\b|(?:of|over|above|below|under) {_OF_SPEED})",
    rf"\b{_MORE} by (?:up to )?{_PERCENT}",
    # Measured memory.
    rf"\bpeaks?\b[^.|]{{0,40}}?{_SPAN}[kMGT]i?B\b",
    rf"{_SPAN}[kMGT]i?B\b[^.|]{{0,25}}\b(?:at (?:the|its) peak|peak memory)\b",
)
_QUANTITY = re.compile("|".join(f"(?:{quantity})" for quantity in _QUANTITIES), re.IGNORECASE)
# A cell of a table that is nothing but a measurement: "1.33", "2.5 x", "364 to 372". Also a heading
# with a unit of time or of speed above such a cell.
_CELL = re.compile(r"\d[\d,]*\.\d+(?: ?x)?|\d[\d,]*(?:\.\d+)? ?x|\d[\d,.]*, \d[\d,.]*")
_UNIT = re.compile(r"(?:^|[\s(,])(?:us|µs|ms|seconds|tokens/s|GB/s|TFLOP/s|GFLOP/s)(?:$|[\s),])")
_PLAIN = re.compile(r"\d[\d,]*(?:\.\d+)?")


def find(text: str) -> list[str]:
    """Return the measurements of a page that no table and no figure of a script has.

    Returns:
      What was found, each with the words around it, in the order of the page.
    """
    for pattern, instead in ((_CODE, "\n"), (_GENERATED, " "), (_LINK, "]")):
        text = pattern.sub(instead, text)
    lines = text.split("\n")
    tables = [line for line in lines if line.startswith("|")]
    prose = " ".join("." if line.startswith("|") else line for line in lines)
    prose = re.sub(r"\s+", " ", prose)
    found = [
        prose[max(0, match.start() - 40) : match.end() + 20].strip()
        for match in _QUANTITY.finditer(prose)
    ]
    return found + _in_tables(tables)


def _in_tables(lines: list[str]) -> list[str]:
    """Return the rows of tables that have a measurement in a cell."""
    found, heading, above = [], [], ""
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[-:| ]+", line):
            heading = [cell.strip() for cell in above.strip("|").split("|")]
        timed = any(_UNIT.search(name) for name in heading)
        # The first cell says what the row is of: it may be a version, or a setting.
        if any(map(_QUANTITY.search, cells)) or any(
            _CELL.fullmatch(cell) or (timed and _PLAIN.fullmatch(cell)) for cell in cells[1:]
        ):
            found.append(line[:100])
        above = line
    return found
