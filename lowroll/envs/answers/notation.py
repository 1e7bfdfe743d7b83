"""The notation of final answers, normalised before comparison.

`plain` unifies characters that look alike. `tidy` also removes meaningless parts (dollars, fonts,
colours, spacing, a full stop). The other functions take tidy text.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

SIGNS = str.maketrans(
    {
        "−": "-",
        **dict.fromkeys("–‐‑‒", "-"),
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "°": r"^\circ ",
        "π": r"\pi ",
        "√": r"\sqrt ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        **dict.fromkeys("⇒⟹", r"\implies "),
        **dict.fromkeys("⇔⟺", r"\iff "),
        **dict.fromkeys("→⟶", r"\to "),
        **dict.fromkeys("’′", "'"),
        "£": "",
        "€": "",
        "¥": "",
        # joiners, byte order marks, writing directions
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\u2061\u2062\ufeff", ""),
        **dict.fromkeys("\u200e\u200f\u202a\u202b\u202c\u202d\u202e", ""),
        **dict.fromkeys("\u2066\u2067\u2068\u2069", ""),
    }
)
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
FRACTIONS = re.compile("[¼-¾⅐-⅞]")
SI = "m|s|g|h|L|N|J|W|V|A|K"
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt"
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SPACE = r"(?<!\\)\\[,;:!> ]|\\q?quad(?![A-Za-z])"
COMMANDS = {
    "dfrac": r"\frac",
    "tfrac": r"\frac",
    "cfrac": r"\frac",
    "dbinom": r"\binom",
    "tbinom": r"\binom",
    "leqslant": r"\leq",
    "le": r"\leq",
    "geqslant": r"\geq",
    "ge": r"\geq",
    "ne": r"\neq",
    "lt": "<",
    "gt": ">",
    "mid": "|",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "langle": "(",
    "rangle": ")",
    "infin": r"\infty",
    "varnothing": r"\emptyset",
    "backslash": r"\setminus",
    "simeq": r"\approx",
    "Rightarrow": r"\implies",
    "Longrightarrow": r"\implies",
    "Leftrightarrow": r"\iff",
    "Longleftrightarrow": r"\iff",
    "rightarrow": r"\to",
    "longrightarrow": r"\to",
}
BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
UNSEEN = r"[hv]?phantom|[hv]space\*?|label|tag\*?"
COLOUR = r"(?:text|page)?color|colorbox|fcolorbox\s*\{[^{}]*\}"
SWITCHES = (
    "displaystyle|textstyle|scriptstyle|limits|tiny|scriptsize|small|normalsize|[lL]arge|LARGE|"
    "[hH]uge|bf|it|rm|sf|tt|bfseries|itshape|mathstrut|strut"
)
DOTS = r"\ldots"
SPELLINGS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(?:\s|~)+", " "),
        (r"(?<!\\)\\[()\[\]]|\\?\$", ""),
        (r"(^|[:=])\s*(\*\*|__|`)(.+?)\2", r"\1 \3"),  # bold and code in Markdown
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (rf"\\(?:{UNSEEN})\s*{BRACED}", ""),
        (rf"\\(?:{COLOUR})\s*(?:\[[^\]]*\])?\s*\{{[^{{}}]*\}}", ""),
        (r"\\(?:underline|emph|ensuremath)\s*(?=\{)", ""),
        (rf"\\(?:{SWITCHES})(?![A-Za-z])", ""),
        (r"(?:\.\s*){3,}|\\(?:[lc]?dots|dots[cbmio])(?![A-Za-z])", r"\\ldots "),
        # 3\,159 and 10,\!080 and 1{,}000
        (
            rf"(?<=\d)(?:,?(?:{SPACE})|\{{,\}})\s*(?=\d{{3}}(?!\d))",
            "",
        ),
        (r"\{,\}", ","),
        (r"\\(?:text(?:bf|it|rm|normal|sf)?|[mh]box|mathrm)\s*\{", r"\\text{"),
        (r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm)\s*\{", "{"),
        (r"\\text\{\s*([eidI])\s*\}", r"\1"),
        (
            r"^\s*(\\text\{)?\s*(?i:(?:the\s+)?(?:final\s+)?answer\b(?:\s+is\b)?)\s*[:=]?\s*",
            r"\1",
        ),
        # 576\pi\;m^{2}
        (
            rf"(?<=[\d}}i])\s*(?:{SPACE})+\s*({SI})(\^\{{?\d\}}?)?\s*$",
            r"\\text{\1}\2",
        ),
        (rf"(?:{SPACE}|\s)+", " "),
        (rf"\\({'|'.join(COMMANDS)})(?![A-Za-z])", lambda found: COMMANDS[found[1]]),
        (r"(?<![<>=!])=>", r"\\implies "),
        (r"==+", "="),
        (r"<=", r"\\leq "),
        (r">=", r"\\geq "),
        (r"!=|\\not\s*=", r"\\neq "),
        (r"(?<![A-Za-z\\])(?:inf|infinity|oo)(?![A-Za-z])", r"\\infty"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"\\(?:mathbb\s*\{?\s*R\s*\}?|R(?![A-Za-z]))", r"(-\\infty,\\infty)"),
        (r"\^\s*\{?\s*(?:\\circ|\\degree)\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\\{\s*\\\}", r"\\emptyset"),
        (r"(?<![\w.\\])(\d+)\s*_\s*(?:\{\s*10\s*\}|10(?!\d))", r"\1"),
        (r"\\%", "%"),
        (r"(?<=[\d}\s])(?:\\text\{\s*)?(?:per ?cent|percentage|pct)\s*\}?\s*\.?$", "%"),
        (r"\\text\{([^{}]*\d[^{}]*)\}", r" \1 "),  # \text{0.75}
        (
            r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*",
            ", ",
        ),
        (rf"\\text\{{\s*((?:{'|'.join(SCALES)})s?)\b\s*([^{{}}]*)\}}", r" \1 \\text{\2}"),
        (r"\\text\{\s*\}", ""),
        (r"(?<![A-Za-z])(?:np|math)\.", ""),
        (rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])", r"\\\1"),
        (r"(?<=\d)\.(?=[^\d.\\]|$)", ""),  # 1./3
        (r"(?<=[A-Za-z)}])('+)", lambda found: "^{" + r"\prime" * len(found[1]) + "}"),
        (r"^(?:[\s=:\"'*`]|\\(?:approx|implies|therefore)(?![A-Za-z]))+", ""),
        (r"[\s.,;:\"'\\*`]+$", ""),
        (r"^\{([^{}]*)\}$", r"\1"),
    )
]

BOXED = re.compile(rf"\s*\$?\s*\\(?:boxed|fbox)\s*({BRACED})\s*\$?\s*")

CHOICE = re.compile(
    r"(?:\\text\{)?+\s*+\(?+\s*+([A-Z])(?![\d_^])\s*+\)?+\s*+\}?+\s*+\)?+(?![A-Za-z_^(])(.*)",
    re.DOTALL,
)
NUMBER = re.compile(
    r"([+-]?)\s*((?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"\s*(?:[eE]([+-]?\d+)|(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d+)\s*\}?)?"
)
TEN = re.compile(r"([+-]?)10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?")
EULER = re.compile(r"[+-]?(?!1e)\d+e[+-]\d")
POWER = re.compile(r"(?<![A-Za-z\\\d.])(\d*\.?\d+)[eE]([+-]?\d+)(?![\d.A-Za-z(\\^])")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
CLOCK = re.compile(
    r"(\d{1,2})(?::(\d\d))?\s*(?:\\text\{)?\s*(?:([ap])\s*\.?\s*m\s*\.?)?\s*\}?", re.IGNORECASE
)
NUMERAL = re.compile(
    r"(-?[0-9A-Za-z]+)\s*_\s*(?:\{\s*(?:\\text\{)?\s*([^{}]+?)\s*\}?\s*\}|(?:\\text\{)?\s*(\w+)\s*\}?)"
)
SCALE = re.compile(
    rf"(?<=[\d}})])\s*(?:\\text\{{)?\s*({'|'.join(SCALES)})s?\s*\}}?$", re.IGNORECASE
)
COUNTING = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    "(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
)
NO_UNITS = rf"and|or|nor|xor|not|but|if|is|are|was|plus|minus|divided|half|{COUNTING}"
# without a space: 5orsix
NOT_GLUED = rf"(?!(?i:and|or|xor|not|but|over|plus|minus|versus)|[A-Za-z]*(?i:{COUNTING})\b)"
COUNTED_IN = re.compile(
    rf"\s*(?:({'|'.join(SCALES)})s?\b(?:\s*\\text\{{([^{{}}]*)\}})?)", re.IGNORECASE
)
LABEL = rf"\\text\{{(?![^{{}}]*(?i:\b(?:{NO_UNITS})\b))[^{{}}\d,]*\}}"
SHORT = "cm|mm|km|dm|nm|kg|mg|ml|mL|ft|yd|mi|lb|oz|hr|am|pm|Hz|sq|cu|kW|eV|Pa"
COUNTED = rf"(?<=[\s/])[A-Za-z]{{3,}}+|(?<!\s){NOT_GLUED}[A-Za-z]{{5,}}+"
WORD = (
    rf"(?<![A-Za-z\\])(?:[ck]?m/[sh]|{SHORT}|"
    rf"(?!(?:{FUNCTIONS}|(?i:{NO_UNITS})|(?:{'|'.join(SCALES)})s?)\b)(?:{COUNTED}))\b\.?"
)
UNIT = re.compile(
    rf"(?:(?<=[\d}}\)%\s])|(?<=\\pi))\s*(?:\^\\circ\s*[CF]?|"
    rf"(?>(?:/\s*+)?(?:{LABEL}|{WORD})(?:\s*+\^\s*+\{{?-?\d\}}?)?\s*+)+)\s*$"
)
OPERATOR = re.compile(r"[-+*/=<>^_(,\\]$|\\(?:cdot|times|div|pm|mp|in|leq|geq|neq|approx|cup|cap)$")
WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
NAME = re.compile(
    rf"(?!.*\b(?:{NO_UNITS})\b)"
    r"(?:[A-Za-z]|[A-Z]{2,}|[A-Za-z][A-Za-z ]{3,}|\\text\{[^{}]*\}|"
    r"\\overline\{[^{}]*\}|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)|"
    r"\\[A-Za-z]+(?![A-Za-z\s]*\{)(?:\s*[A-Z]+)?)"
    r"\s*(?:_\s*(?:\w|\{[^{}]*\}))?\s*(?:\^\{(?:\\prime)+\})?\s*(?:\([A-Za-z,\s]*\))?"
)
# of a line with one number and no variables
GLUED = rf"(?:{SI}|l|C|F|{SHORT}|{NOT_GLUED}[A-Za-z]{{5,}})(?![A-Za-z])"
APART = rf"(?:{SI}|l|a|C|F|[A-Za-z][A-Za-z'.-]+)(?![A-Za-z])"
POWERED = r"(?:\s*\^\s*\{?-?[1-9]\}?)?"
COUNTS = re.compile(
    rf"(?!\s*squared|\s*cubed)(?!.*(?i:\b(?:{NO_UNITS})\b))(?:{GLUED}{POWERED})?"
    rf"(?:\s*(?:%|\^\\circ|/\s*(?={APART})|\([A-Za-z .]*\)|\\text\{{[^{{}}\d,]*\}}{POWERED}|"
    rf"(?:(?<=\s)|(?<=/)|(?<=\\circ)){APART}{POWERED}))*"
)


def plain(text: str) -> str:
    """Normalise look-alike characters and remove invisible ones."""
    if text.isascii():
        return text
    text = FRACTIONS.sub(_fraction, text)
    text = RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = LOWERED.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    return unicodedata.normalize("NFKC", text.translate(SIGNS)).translate(SIGNS)


def _fraction(found: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def unboxed(text: str) -> str:
    """Return a box's content; other text unchanged."""
    while (inner := BOXED.fullmatch(text)) is not None:
        text = inner[1][1:-1].strip()
    return text


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    text = unboxed(plain(text))
    for pattern, by in SPELLINGS:
        text = pattern.sub(by, text)
    return text.strip()


def squeezed(text: str) -> str:
    """Remove spaces, labels and braces of single signs. Equal results are equal answers."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return re.sub(r"(?<!\\)\{(\w)\}", r"\1", text)


def choice(text: str) -> tuple[str, str] | None:
    r"""Return (letter, its text or "") of `(B)`, `B.`, `\text{(B)} 12`, if there is exactly one."""
    match = CHOICE.fullmatch(text)
    if match is None or re.search(r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])|,|\\neq|[=<>+^]", match[2]):
        return None
    return match[1], match[2].lstrip(" .:)}").rstrip(" .")


def quantity(text: str) -> Decimal | None:
    """Return the exact value of a plain number, `1,234.50`, `4.5e33`, `4.5 \\times 10^{33}`,
    `10^{-3}`, or None."""
    if power := TEN.fullmatch(text):
        sign, digits, exponent = power[1], "1", power[2]
    elif (match := NUMBER.fullmatch(text)) is not None:
        sign, digits, exponent = match[1], re.sub("[, ]", "", match[2]), match[3] or match[4] or "0"
    else:
        return None
    return Decimal(f"{sign}{digits}e{exponent}") if len(exponent) < 10 else None


def ungrouped(text: str) -> str:
    """Remove a plain number's thousands separators; other text unchanged."""
    return re.sub(r"(?<=\d)[, ](?=\d{3})", "", text) if NUMBER.fullmatch(text) else text


def readings(text: str) -> list[str]:
    """Return the possible formulas of a text: `2e-3` is a power of ten, or 2e - 3."""
    power = POWER.sub(r"(\1\\cdot 10^{\2})", text)
    return [power, re.sub("([eE])", r"\1 ", text)] if EULER.fullmatch(text) else [power]


def repeating(text: str) -> str:
    r"""Replace repeating decimals, `0.1\overline{6}`, by fractions."""

    def fraction(found: re.Match[str]) -> str:
        whole, head, period = found[1] or "0", found[2], found[3]
        # 0.1666... is (16 - 1) / 90: the periods of 100 and 10 times the number cancel
        numerator = int(whole + head + period) - int(whole + head)
        denominator = 10 ** len(head) * (10 ** len(period) - 1)
        value = Fraction(numerator, denominator)
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    return REPEATING.sub(fraction, text)


def scaled(text: str) -> tuple[str, int]:
    """Return a quantity and the power of ten of its percent sign or word, such as million."""
    if text.endswith("%"):
        return text[:-1].strip(), -2
    if (match := SCALE.search(text)) is not None:
        return text[: match.start()].strip(), SCALES[match[1].lower()]
    return text, 0


def without_unit(text: str) -> tuple[str, str]:
    r"""Return (quantity, powers of its unit) of `3\text{ cm}^2`, `10 dollars`, `90^\circ`."""
    unit = UNIT.search(text) if not SCALE.search(text) else None
    number = text[: unit.start()].strip() if unit is not None else ""
    if unit is None or not number or OPERATOR.search(number):
        return text, ""
    return number, "".join(re.findall(r"\d", unit[0]))


def stated_number(text: str) -> str | None:
    """Return the only number of a line such as `x = 1,000 dollars` or `5 million` ("5e6"),
    or None."""
    name, equals, value_text = tidy(text).rpartition("=")
    if equals and NAME.fullmatch(name.strip()) is None:
        return None
    statement = value_text.strip()
    match = TEN.match(statement) or NUMBER.match(statement)
    if match is None:
        return None
    number = re.sub(r"^([+-])\s+", r"\1", match[0].strip())
    unit_text = statement[len(match[0].rstrip()) :]
    scale = COUNTED_IN.match(unit_text)
    if scale is not None:
        scale_word, label = scale.groups()
        number += f"e{SCALES[scale_word.lower()]}"
        unit_text = unit_text[scale.end() :]
        if label:
            unit_text = rf"\text{{{label}}}{unit_text}"
    if COUNTS.fullmatch(unit_text) is None or quantity(number) is None:
        return None
    return number


def clock(text: str) -> tuple[int, int, str] | None:
    """Return (hour, minute, "a", "p" or "") of `1:58 am` and `5am`, or None."""
    match = CLOCK.fullmatch(text)
    if match is None or not (match[2] or match[3]) or int(match[2] or 0) > 59:
        return None
    return int(match[1]), int(match[2] or 0), (match[3] or "").lower()


def numeral(text: str) -> tuple[str, str] | None:
    """Return (digits, base) of `52_{8}`, or None, as for `2x_1`."""
    match = NUMERAL.fullmatch(text)
    if match is None:
        return None
    digits, base = match[1].upper(), match[2] or match[3]
    if re.fullmatch(r"-?\d+", digits) is None:
        try:
            int(digits, int(base))
        except ValueError:
            return None
    return digits, base


def words(text: str, beside_words: bool = False) -> str | None:
    r"""Normalise words such as `\text{East}` and `no solution`; None for a possible formula.
    `beside_words`: shorter texts are words too."""
    label = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    content = label[1] if label else text
    letters = r"[A-Za-z]{2}" if label or beside_words else r"[A-Za-z]{4}"
    if WORDS.fullmatch(content.strip()) is None or not re.search(letters, content):
        return None
    return " ".join(re.sub("[.'-]", " ", content).casefold().split())
