r"""Final answers of whole responses: what is accepted though it is wrong, and what is refused though
it is right."""

from __future__ import annotations

import pytest

from lowroll.envs.answers.equality import Unjudged, boxed_answer, equal, hash_answer, last_answer

HIDDEN = "\u200b"  # a space of no width


def reward(gold: str, response: str) -> bool:
    """Whether a response has the gold answer; one that cannot be judged is wrong."""
    answer = last_answer(response)
    try:
        return answer is not None and equal(gold, answer)
    except Unjudged:
        return False


WRONG = [
    # a number, and something else behind it
    ("5", "#### 5 or six"),
    ("5", "#### 5 and six"),
    ("5", "#### 5, six"),
    ("5", "#### 5 six"),
    ("5", "#### 5/six"),
    ("5", "#### 5 + x"),
    ("5", "#### 5x"),
    ("5", "#### 5 plus three"),
    ("5", "#### not 5"),
    ("5", "#### 5 thousand"),
    ("5", "#### 5^2"),
    ("5", "#### 5!"),
    ("5", "#### 5..."),
    ("5", r"\boxed{5 six}"),
    ("5", r"\boxed{5\text{ six}}"),
    ("5", r"\boxed{5 plus three}"),
    ("5", r"\boxed{5 or six}"),
    ("5", "#### 5orsix"),
    ("5", "#### six = 5"),
    ("5", r"\boxed{5orsix}"),
    ("5", r"\boxed{5plusx}"),
    ("5", r"\boxed{6 == 5}"),
    ("5", r"\boxed{\boxed{6} = 5}"),
    # a box in a box is a part of it
    ("5", r"\boxed{\boxed{5} 6}"),
    ("6", r"\boxed{\boxed{5} 6}"),
    ("56", r"\boxed{\boxed{5} 6}"),
    ("6", r"\boxed{\boxed{5} \boxed{6}}"),
    ("5", r"\boxed{5 + \boxed{5}}"),
    # what cannot be seen is not said
    ("5", r"\textbf{5} \boxed{\phantom{5}}"),
    ("5", r"\boxed{\hphantom{5}}"),
    ("5", r"\boxed{\vphantom{5}6}"),
    ("5", rf"\boxed{{{HIDDEN}}}"),
    # an implication is no value
    ("5", r"\boxed{4 \implies x=5}"),
    ("4", r"\boxed{4 \implies x=5}"),
    ("5", r"\boxed{4 \Rightarrow 5}"),
    ("4", r"\boxed{4 \Rightarrow 5}"),
    ("5", r"\boxed{x=4 \iff x=5}"),
    ("5", r"\boxed{4 ⇒ x=5}"),
    ("5", r"\boxed{4 \to 5}"),
    ("5", r"\boxed{4 → 5}"),
    # something follows that is not said
    ("5", r"\boxed{5\ldots}"),
    ("5", r"\boxed{5\dots}"),
    ("5", r"\boxed{5...}"),
    ("5", r"\boxed{5…}"),
    ("0.5", r"\boxed{0.5\ldots}"),
    ("\\frac{1}{2}", r"\boxed{0.500000\ldots}"),
    ("1,2", r"\boxed{1,2,\ldots}"),
    # a numeral with a base is no other number
    ("52_8", r"\boxed{52}"),
    ("52", r"\boxed{52_8}"),
    ("52_8", r"\boxed{42}"),
    ("42", r"\boxed{52_8}"),
    ("52", r"\boxed{52_x}"),
    ("52", r"\boxed{52_{x+1}}"),
    ("52", r"\boxed{52_\text{eight}}"),
    ("4210_{5}", r"\boxed{4210}"),
    # two numbers are no point
    ("(1,2)", r"\boxed{1,2}"),
    ("1,2", r"\boxed{(1,2)}"),
    ("1,2", r"\boxed{(2,1)}"),
    ("(1,2)", r"\boxed{x=2, y=1}"),
    ("(1,2)", r"\boxed{x=1, x=2}"),
    ("(1,2)", r"\boxed{1 \text{ and } 2}"),
    # words and colours hide nothing
    (r"\text{Yes}", r"\boxed{no}"),
    (r"\text{Yes}", r"\boxed{yesno}"),
    ("5", r"\boxed{\textcolor{5}{6}}"),
    ("5", r"\boxed{\textcolor{red}{5} 6}"),
    ("5", r"\boxed{\color{5} 6}"),
    (r"\emptyset", r"\boxed{\{0\}}"),
    (r"\emptyset", r"\boxed{\{\emptyset\}}"),
    (r"\emptyset", r"\boxed{}"),
    (r"\emptyset", r"\boxed{0}"),
    ("6", r"\boxed{5 \approx 6}"),
    ("5", r"\boxed{\neq 5}"),
    ("5", r"\boxed{\leq 5}"),
    ("18", r"−\boxed{18}"),
    ("18", "#### −18"),
    ("1000", "#### 1 00"),
    ("1000", "#### 1, 000"),
    ("18", "#### 1 8"),
    ("15", "#### 1.5e3"),
    ("18", "#### Answer: 18 or 19"),
    ("18", "#### 18 m^3 or 19"),
    ("18", "#### 18 x"),
    ("18", "#### Step 18"),
]

RIGHT = [
    ("-18", "#### −18"),
    ("-18", "#### –18"),
    ("-18", "#### $−18$"),
    ("-18", r"\boxed{−18}"),
    ("-18", r"−\boxed{18}"),
    ("-18", "#### - 18"),
    ("1000", "#### 1 000"),
    ("1000", "#### 1\u202f000"),
    ("1000", "#### 1\u2009000"),
    ("1000", "#### 1\u00a0000 dollars"),
    ("1000", r"#### 1\,000"),
    ("1000000", "#### 1 000 000"),
    ("1000", "\\boxed{1\u2009000}"),
    ("12", r"#### \(12\)"),
    ("12", r"#### \[12\]"),
    ("12", r"#### **\(12\)**"),
    ("12", r"#### \(12\) dollars"),
    ("18", "#### 18 m^3"),
    ("18", "#### 18 m³"),
    ("18", "#### 18 cm^{2}"),
    ("18", r"#### 18\text{ m}^3"),
    ("18", r"#### 18 \text{ square feet}"),
    ("18", "#### 18 m"),
    ("18", "#### 18 km/h"),
    ("18", "#### 18 miles per hour"),
    ("18", "#### 18 pieces of cake"),
    ("18", "#### 18 (dollars)"),
    ("18", "#### 18%"),
    ("18", "#### 18°"),
    ("18", "#### €18"),
    ("18", "#### x = 18"),
    ("18", "#### $x = 18$"),
    ("18", r"#### \text{Area} = 18"),
    ("18", "#### Answer: 18"),
    ("18", "#### Answer: **18**"),
    ("18", "#### **Answer:** 18"),
    ("18", "#### The final answer is 18."),
    ("18", "#### `18`"),
    ("18", "#### = 18"),
    ("18", "#### ≈ 18"),
    ("18", r"\boxed{\text{Answer: } 18}"),
    ("18", r"\boxed{Answer: 18}"),
    ("1500", "#### 1.5e3"),
    ("1500", r"#### 1.5 \times 10^3"),
    ("1500", "#### 1.5 × 10³"),
    ("0.0015", "#### 1.5e-3"),
    ("5000", "#### 5 thousand"),
    ("5000000", "#### 5 million dollars"),
    ("18", f"#### {HIDDEN}18"),
    ("18", f"#### 1{HIDDEN}8"),
    ("18", f"####{HIDDEN} 18\ufeff"),
    ("18", f"\\boxed{{1{HIDDEN}8}}"),
    ("18", "\\boxed{\u206018\u200d}"),
    ("18", "#### １８"),
    ("(1,2)", "\\boxed{（1，2）}"),
    ("x^4", "\\boxed{x⁴}"),
    ("x_1", "\\boxed{x₁}"),
    ("52_8", "\\boxed{52₈}"),
    ("52", r"\boxed{52_{10}}"),
    ("52_{10}", r"\boxed{52}"),
    (r"\text{Yes}", r"\boxed{yes}"),
    (r"\text{Yes}", r"\boxed{Yes}"),
    ("yes", r"\boxed{\text{Yes}}"),
    (r"\text{No}", r"\boxed{no}"),
    (r"\text{odd}", r"\boxed{Odd}"),
    ("5", r"\boxed{\textcolor{red}{5}}"),
    ("5", r"\boxed{\color{red}{5}}"),
    ("5", r"\boxed{{\color{red} 5}}"),
    ("5", r"\boxed{\color[rgb]{1,0,0}5}"),
    ("5", r"\boxed{\colorbox{yellow}{5}}"),
    ("5", r"\textcolor{red}{\boxed{5}}"),
    ("5", r"\boxed{\underline{5}}"),
    ("5", r"\boxed{\underline{\textbf{5}}}"),
    ("5", r"\boxed{\emph{5}}"),
    ("5", r"\boxed{\large 5}"),
    ("5", r"\boxed{\bf 5}"),
    (r"\frac{1}{2}", r"\boxed{\textcolor{blue}{\frac{1}{2}}}"),
    ("5", r"\boxed{\approx 5}"),
    ("5", r"\boxed{≈ 5}"),
    ("5", r"\boxed{\simeq 5}"),
    ("5", r"\boxed{\boxed{5}}"),
    ("5", r"\boxed{\implies 5}"),
    ("5", r"\boxed{5\phantom{6}}"),
    ("5", r"\boxed{$\boxed{5}$}"),
    ("5", r"\boxed{5 km/h}"),
    ("5", r"\boxed{5 dollars/hour}"),
    (r"\emptyset", r"\boxed{\{\}}"),
    (r"\emptyset", r"\boxed{\{ \}}"),
    (r"\emptyset", r"\boxed{\left\{\right\}}"),
    (r"\emptyset", r"\boxed{\varnothing}"),
    (r"\emptyset", r"\boxed{∅}"),
    (r"\{\}", r"\boxed{\emptyset}"),
    ("(1,2)", r"\boxed{x=1, y=2}"),
    ("(1,2)", r"\boxed{(x,y)=(1,2)}"),
    ("1,2", r"\boxed{\{1,2\}}"),
    (r"\sqrt{2}", r"\boxed{1.41421356\ldots}"),
    (r"\frac{2}{3}", r"\boxed{0.666666...}"),
    (r"1,2,\ldots,10", r"\boxed{1, 2, \dots, 10}"),
    (r"x=4 \implies y=5", r"\boxed{x=4 \Rightarrow y = 5.0}"),
]


def test_what_is_wrong_is_refused():
    assert [pair for pair in WRONG if reward(*pair)] == []


def test_what_is_right_is_accepted():
    assert [pair for pair in RIGHT if not reward(*pair)] == []


@pytest.mark.parametrize(
    "text, answer",
    [
        ("#### 7 or eight\n#### 6", "6"),
        ("#### 6\n#### 7 or eight", "6"),
        ("#### 1.5e3", "1.5e3"),
        ("#### 1 000 000", "1 000 000"),
        ("#### 5 million dollars", "5e6"),
        ("#### 1,000", "1,000"),
        ("#### 12,34", None),
        ("#### 1.2.3", None),
        ("#### 18 dollars, 19 with tax", None),
        ("#### -", None),
        ("####", None),
    ],
)
def test_the_number_of_a_line(text, answer):
    assert hash_answer(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{\boxed{5} 6}", r"\boxed{5} 6"),
        (r"\boxed{4} \boxed{ \boxed{5} }", "5"),
        (r"\boxed{4 and then \boxed{5}", "5"),  # the first never closes
        (r"\boxed{3} and \boxed{\boxed{4}}", "3, 4"),
        (r"\boxed{5} and \boxed{6", None),
    ],
)
def test_a_box_in_a_box_belongs_to_it(text, answer):
    assert boxed_answer(text) == answer
