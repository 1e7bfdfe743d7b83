r"""Equality of final answers: right and wrong ones of every kind that a comparison is prone to get
wrong."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sympy

from bench import scoring
from lowroll.envs.answers import expressions
from lowroll.envs.answers.equality import Unjudged, boxed_answer, equal, hash_answer
from lowroll.envs.problems import final_answer

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWROLL_DATA", ROOT.parent / "shared" / "data"))


def judge(gold: str, answer: str, ordered: bool = False) -> bool:
    """As the environment does: what cannot be judged is wrong."""
    try:
        return equal(gold, answer, ordered)
    except Unjudged:
        return False


def table(text: str) -> list[tuple[str, str]]:
    """Lines `gold | answer | answer | ...` as pairs."""
    rows = [line.strip().split(" | ") for line in text.strip().splitlines()]
    return [(gold, answer) for gold, *answers in rows for answer in answers]


RIGHT = {
    "scientific notation": table(r"""
        4.5e33 | 4.5 \times 10^{33} | 4.5 \cdot 10^{33} | 4.5\times10^33 | 4.5E33 | 4.5e+33 | 45e32
        4.5e33 | 0.45 \times 10^{34}
        3e8 | 300000000 | 300,000,000 | 3 \times 10^8 | 3.0e8 | 3\times 10^{8} \text{ m/s} | $3 \times 10^{8}$ m/s
        1e-5 | 0.00001 | 10^{-5} | 1 \times 10^{-5} | .00001
        6.5e-2 | 0.065 | 6.5\times 10^{-2} | 6.5%
        1.70e4 | 17000 | 17,000 | 1.7 \times 10^4
        2.19e6 | 2.19\cdot10^6 | 2190000 | 2.19 * 10^6
        3.61e2 | 361 | 361.0
        4.5 \times 10^{33} | 4.5e33
        10^{-3} | 0.001 | 1e-3 | \frac{1}{1000}
        2e+1 | 1+2e | 2e + 1
        """),
    "percent and degrees": table(r"""
        50 | 50.0\% | 50\% | 50% | 50 percent | 50\text{ percent}
        12.5 | 12.5\% | 12.5 \%
        0.125 | 12.5\%
        1.1\% | 1.1 | 1.10\% | 0.011
        5.3\% | 5.3 | 5.3 percent
        \frac{1}{2} | 50\%
        50\% | \frac12 | 0.5
        \frac{100}{3} | \frac{100}{3}\%
        90^\circ | 90 | 90° | 90^{\circ} | 90 degrees | 90 \text{ degrees} | 90\degree | 90.0
        76 | 76^\circ | 76^{\circ}
        \frac{270}7\text{ degrees} | \frac{270}{7} | \frac{270}{7}^\circ | \frac{270}{7} \text{ degrees} | 38\frac{4}{7}
        """),
    "spacing, fonts and full stops": table(r"""
        3159 | 3\,159 | 3,159 | 3{,}159 | 3\ 159 | 3159. | \text{3159} | \mathbf{3159} | $3159$ | **3159** | 3,\!159
        0.75 | \text{0.75} | .75 | 0.750 | \mathrm{0.75} | \frac{3}{4} | 3/4 | \text{0.75}.
        11,\! 111,\! 111,\! 100 | 11111111100 | 11,111,111,100 | 11\,111\,111\,100
        \$32,\!348 | 32348 | \$32,348 | 32,348.00 | 32348 \text{ dollars} | $32348$
        \frac{1}{2} | \dfrac{1}{2} | \tfrac12 | 1/2 | 0.5 | \frac{1}{2}. | \left(\frac{1}{2}\right)
        \frac{1}{2} | \displaystyle\frac12
        x^2 | x^{2} | {x}^{2} | \,x^2\, | x^2 .
        \frac{3}{2} | 1 1/2 | 1\frac{1}{2} | 1\frac12 | 1 \frac{1}{2} | 1.5
        137 \frac{1}{2} | 137.5 | \frac{275}{2} | 137 1/2
        -1./3 | -\frac{1}{3} | -1/3
        np.arcsin(10/13) | \arcsin(10/13) | \arcsin\left(\frac{10}{13}\right) | \sin^{-1}(10/13)
        0.1\overline{6} | \frac{1}{6} | 1/6
        \frac{1}{3} | 0.\overline{3} | 0.333333 | 0.33333333333
        """),
    "units": table(r"""
        10 | 10 dollars | 10 \text{ dollars} | \$10 | 10 \text{ cm}^2 | 10 cm | 10 miles per hour | 10\ \mathrm{kg}
        5.4 \text{ cents} | 5.4 | 5.4 cents | 5.4\text{ cents}
        864 \mbox{ inches}^2 | 864 | 864 \text{ in}^2 | 864 square inches | 864\text{ inches}^{2}
        15\mbox{ cm}^2 | 15 | 15 cm^2 | 15 \text{ cm}^{2} | 15\,\mathrm{cm}^2
        20 $cm^{2}$ | 20 | 20 \text{ cm}^2 | 20cm^2
        36\sqrt{7}cm^{3} | 36\sqrt{7} | 36 \sqrt 7 \text{ cm}^3
        576\pi\;m^{2} | 576\pi | 576 \pi \text{ m}^2 | 576\pi \, m^2
        22.1cm^{2} | 22.1 | 22.1 \text{ cm}^2
        2s | 2\text{ s} | 2 s
        5am | 5 am | 5:00 am | 5 \text{ a.m.} | 5
        1:58 am | 1:58 \text{ AM} | 1:58
        7000 | 7 thousand | 70 \text{ hundred}
        3e12 | 3 trillion | 3000 billion
        5000000 | 5 million | 5 \text{ million} | 5 \text{ million dollars}
        """),
    "choices and words": table(r"""
        \text{(B)} | B | (B) | B. | \textbf{(B)}\ 12 | \textbf{(B) } 12 | \text{B} | (B) 12 | \textbf{B} | \mathrm{(B)}
        \textbf{(B)}\ 12 | B | (B) | 12 | \textbf{(B)}\ 12 | (B) 12 | \text{(B)}
        \textbf{(B)}\ \frac{1}{2} | B | 0.5 | \textbf{(B)}\ \frac12
        B | B. | (B) | \text{(B)} | \textbf{(B)}\ 12 | \textbf{(B)}\ \frac{1}{2} | B) 12 | B: 12 | $B$
        C | \textbf{(C)}\ 3\sqrt{2} | C. | (C)
        \text{east} | east | East | \text{East} | \textbf{east} | \mathrm{east}
        \text{even} | even | \textit{even}
        Quadrant I | \text{Quadrant I} | quadrant I
        \text{a necessary but not a sufficient condition} | a necessary but not a sufficient condition
        \text{ellipse} | Ellipse.
        \text{Navin} | Navin
        """),
    "lists, sets and several values": table(r"""
        16,3,1,1 | 16, 3, 1, 1 | 1,1,3,16 | \{16,3,1,1\} | 16, 3, 1 and 1
        1,-2 | -2, 1 | x=1,-2 | x = -2 \text{ or } x = 1 | -2 and 1 | \{1, -2\} | 1 \text{ and } -2
        1 \pm \sqrt{19} | 1+\sqrt{19}, 1-\sqrt{19} | 1-\sqrt{19}, 1+\sqrt{19} | x = 1\pm\sqrt{19} | \{1 \pm \sqrt{19}\}
        \{1\pm\sqrt{5},-2\} | -2, 1+\sqrt{5}, 1-\sqrt{5} | \{-2, 1-\sqrt5, 1+\sqrt5\}
        $2$ or $-2$ or $\frac{1}{2}$ or $-\frac{1}{2}$ | \pm 2, \pm \frac{1}{2} | 2, -2, 0.5, -0.5
        $48$, $384$ | 48, 384 | 48 and 384
        E_{1},E_{2} | E_1, E_2 | E_1 and E_2
        (12,3,4), (6,5.4,7.6) | (6,5.4,7.6), (12,3,4) | (12, 3, 4) and (6, 5.4, 7.6)
        \{0,2,4,6,8\} | 0,2,4,6,8 | \{8, 6, 4, 2, 0\} | \left\{0,2,4,6,8\right\}
        100,200,300 | 100, 200, 300
        1000, 2000 | 1,000, 2,000 | 1,000 and 2,000 | 2\,000, 1\,000 | x = 1,000, 2,000
        (1,2) | x = (1,2) | (x,y) = (1,2) | x=1, y=2
        \{1,2\} | A = \{1,2\} | A=\{2,1\}
        I,II,III,IV | I, II, III, IV | I, II, III, and IV
        """),
    "intervals and inequalities": table(r"""
        [3,\infty) | x\ge 3 | x \geq 3 | 3 \le x | [3, +\infty) | x \in [3,\infty) | \{x|x \ge 3\} | \{x \mid x \geq 3\}
        (-\infty, 0] | x \le 0 | 0 \ge x | (-\infty,0]
        x \in [-2,7] | [-2,7] | -2 \le x \le 7 | 7 \geq x \geq -2 | \{x : -2 \le x \le 7\}
        \{x|-2\leq x < 1\} | [-2,1) | -2 \le x < 1 | x \in [-2, 1)
        (-\infty, 2) \cup (3, \infty) | (3,\infty)\cup(-\infty,2) | x < 2 \text{ or } x > 3 | x<2 or x>3
        (-\infty, 2) \cup (3, \infty) | x \in (-\infty,2)\cup(3,\infty)
        \left(\frac{3}{5},\frac{8}{3}\right] | (0.6, 8/3] | \frac35 < x \le \frac83
        (-\infty,\infty) | \mathbb{R} | x \in \mathbb{R}
        (3,4] | 3 < x \leq 4 | \left(3, 4\right]
        b > a > c | c < a < b | b>a>c
        x^2 < 4y | 4y > x^2 | 2x^2 < 8y
        1 < x < y < 5 | 5 > y > x > 1
        x \neq 5 | x \ne 5 | 5 \neq x | x\not= 5
        \{x|x=3k,k\in \mathbb{Z}\} | \{x \mid x=3k, k \in \mathbb{Z}\}
        """),
    "equations": table(r"""
        x^2-2x+10=0 | 2x^2-4x+20=0 | x^2+10=2x | 0=x^2-2x+10 | -x^2+2x-10=0
        360=2^3*3^2*5 | 360 = 2^3 \cdot 3^2 \cdot 5 | 2^3*3^2*5=360 | 360=5*3^2*2^3
        y=2x+3 | 2x+3 | y = 3+2x | 2x-y+3=0 | y-2x=3
        y = -2x | -2x | y=-2 \cdot x | 2x+y=0
        5x - 7y + 11z + 4 = 0 | 5x-7y+11z=-4 | -5x+7y-11z-4=0 | 10x-14y+22z+8=0
        \frac{x^{2}}{2} - \frac{y^{2}}{4}=1 | 2x^2-y^2=4 | \frac{x^2}{2}=1+\frac{y^2}{4}
        x=5 | 5 | x = 5.0 | 5 = x
        3.14 | x \approx 3.14
        \frac{1}{3} | \frac{1}{3} \approx 0.33 | x = \frac{1}{3} \approx 0.33
        5 | x=5 | 2+3=5 | x = 2+3 = 5 | \text{Area} = 5 | AB = 5
        MR=SRMC | SRMC=MR | MR = SRMC
        f(x)=-\frac25 x + 13 | -\frac{2}{5}x+13 | f(x) = 13-0.4x
        C(h)=4h+4 | 4h+4 | 4(h+1)
        xy=1 | y=\frac{1}{x} | x = 1/y
        y^{\prime}+r y-r x(t)=0 | y'+ry-rx(t)=0 | y' + r y = r x(t)
        X_{d}=125-1.25 P | 125-1.25P | X_d = 125 - \frac{5}{4}P
        """),
    "expressions": table(r"""
        9c+6 | 6+9c | 3(3c+2) | 9c + 6
        2t | t+t | 2 t
        6r^2-4r-24 | 2(3r^2-2r-12) | 6r^{2} - 4r - 24
        m_{p} c^{2}\left(\gamma^{2}-1\right) \sin ^{2} \theta | m_p c^2 (\gamma^2-1)\sin^2\theta
        m_{p} c^{2}\left(\gamma^{2}-1\right) \sin ^{2} \theta | m_p c^2 (\gamma^2-1)(1-\cos^2\theta)
        \frac{1}{2^{98}} | 2^{-98} | \frac{2}{2^{99}}
        \frac{\sqrt{\pi}}{2} | (\frac{1}{2})! | \frac{1}{2}\sqrt{\pi}
        \sqrt{2} | 1.414214 | 1.41421356
        \pi | 3.141593 | 3.14159
        0 | \sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}} | \sin(\pi) | \ln 1
        \frac{1}{2004!} | 1/2004! | \frac{2005}{2005!} | (2004!)^{-1}
        (5/6)^{300} | \frac{5^{300}}{6^{300}} | \left(\frac{5}{6}\right)^{300}
        \cot x | \frac{\cos x}{\sin x} | \frac{1}{\tan x}
        (a+5)(b+2) | ab+2a+5b+10 | (b+2)(a+5)
        ab+ab^{2}+b | b(a+ab+1)
        e^{-1} | \frac{1}{e} | 1/e
        6 - 5i | -5i+6 | 6-5 i
        3\sqrt{13} | \sqrt{117} | 3 \sqrt{13} | \sqrt{13} \cdot 3
        \frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}} | 3^{-1/2}
        8(\sqrt[10]{2^{7}}) | 8\sqrt[10]{128} | 2^{3.7}
        \begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} | \begin{bmatrix} -1/3 \\ 2/3 \\ 5/3 \end{bmatrix}
        \frac{2}{3} \frac{C}{S} | \frac{2C}{3S}
        3R^2 | 3r^2 | 3 R^{2}
        \frac{e^{t}} {3}+c e^{-2 t} | c e^{-2t} + \frac{1}{3} e^t
        (t + \frac{1}{2} \sin{2t}) u(t) | u(t)(t+\sin(t)\cos(t))
        I(0) e^{-\frac{t}{R C}} | I(0) e^{-t/(RC)}
        52_8 | 52_{8} | 52_{\text{8}}
        \pi(R^2-r^2) | \pi R^2 - \pi r^2 | \pi(R-r)(R+r)
        """),
}

WRONG = {
    "what cannot be judged": table(r"""
        x \neq 5 | x \neq 6 | y \neq 5 | x = 5 | x > 5 | \neq
        1:00 | 12:00 | 1:01 | 0:00 | 1:00:00 | 13:00
        2:05 | 12:30
        5am | 5pm | 6am | 5:30 am
        3 | 1000! | \frac{1}{0} | \infty | 0^0 | \frac{0}{0} | ? | \text{undefined} | }{ | \frac{ | ((( | x_ | ^
        3 | \sqrt | \begin{pmatrix} | \left
        \frac{1}{2} | \nabla \times F | 1 \over 2 2 | \lim_{x \to 0} x | \int_0^1 x dx | \sum_{k=1}^{3} k
        \frac{1}{2} | \frac{1}{2}_3_4 | 🙂 | \boxed{}
        5 | \ | \\ | {} | \{\} | () | [] | , | and | = | =5= | \pm | \cup | 5 \cup 6
        """),
    "vacuous equations": table(r"""
        x^2-2x+10=0 | 0=1 | 0=0 | 1=1 | x=x | x^2+1=0 | x^2-2x+11=0 | 2x^2-4x+21=0 | x^2-2x=10 | 5 | x^2-2x+10
        x^2-2x+10=0 | x = x+1 | y^2-2y+10=0
        360=2^3*3^2*5 | 1=2 | 360=360 | 0=0 | 360=2^3*3^2*6 | 2^3*3^2*5 = 2^3*3^2*5 | 360=8*9*5 | 361=2^3*3^2*5
        y=2x+3 | 0=1 | y=2x+4 | y=3x+3 | y=y | x=2y+3 | y+2x=3 | 0=0
        x=5 | 0=1 | y=5 | x=6 | x=x | 5=5=x=6 | 4=4
        5 | 4=5 | 5=4 | 1=2=5 | x=4 | x = 5 = 6 | 0=0
        5x - 7y + 11z + 4 = 0 | 5x-7y+11z-4=0 | 0=0 | 5x=0 | 5x - 7y + 11z + 4 = 1
        MR=SRMC | MR=SRAC | MR=MR | 0=0
        xy=1 | x=y | xy=2 | 0=1 | x=1
        1 < x < y < 5 | 1 < x < 5 | 1 < y < x < 5 | 1 < x \leq y < 5
        \frac{1}{3} | 0.33 \approx \frac{1}{3} | x \approx 0.33
        b > a > c | b > c > a | a > b > c | b < a < c
        2x+y<5 | 2x+y>5 | 2x+y \leq 5 | 2x+y<6 | 0<1
        """),
    "scientific notation": table(r"""
        4.5e33 | 33e4.5 | 4.5e32 | 4.5e-33 | 4.6e33 | 4.5 \times 10^{34} | 4.5 | 4.5 + 10^{33} | 4.5e3 | 45e33
        4.5e33 | 4.5 \times 33 | 4.5 \cdot e \cdot 33
        3e8 | 8e3 | 3e9 | 3e-8 | 24 | 3 \times 8
        1e-5 | 1e-6 | 1e5 | 0.0001 | 0 | -5 | e-5
        8.7e8 | 8.8e8 | 8e8.7 | 8.7 \times 10^7
        1.325e-27 | 1.325e-28 | 1.324e-27 | 0 | 0.0
        4.6e-24 | 0.0 | 4.6e-23 | 4.6e24
        2e+1 | 2e | 2e-1
        """),
    "near and tiny": table(r"""
        \frac{1}{2^{98}} | \frac{1}{2^{99}} | 0 | 0.0 | \frac{1}{2^{98}+1} | -\frac{1}{2^{98}} | 2^{98}
        (5/6)^{300} | (5/6)^{301} | (6/5)^{300} | 0 | (5/6)^{299}
        \frac{1}{45057474} | 0.0 | 0 | \frac{1}{45057475} | 0.00000002 | 2.2\times 10^{-8}
        \frac{1}{2004!} | \frac{1}{2005!} | \frac{1}{2003!} | 0 | \frac{1}{2004!+1} | 2004!
        \frac{1}{3} | 0.33 | 0.3333 | 0.333334 | 0.333332 | 33 | 0.3
        \frac{1}{8} | 0.12500001 | 0.1249999 | 0.13
        1234567 | 1234567.1 | 1234567.0000001 | 1234566.9999999
        \sqrt{2} | 1.414 | 1.414215 | 1.41 | \sqrt{2}+10^{-60} | \frac{141421356237}{100000000000}
        c^2(\gamma^2-1) | c^2(\gamma^2-2) | c^2(\gamma-1) | c^2\gamma^2-1 | 0
        \gamma - 1 | \gamma - 2 | -1 | \gamma
        x+\frac{1}{2^{98}} | x + \frac{1}{2^{99}} | x
        10^{-30} | 10^{-31} | 0 | 0.0
        2^{100}+1 | 2^{100} | 2^{100}+2
        1 | (-3)! | (\frac{1}{2})! | 0!-1
        0 | \sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}+10^{-70}
        1.414214 | \sqrt{-2} | \sqrt{2}i
        0 | 10^{-20} | \frac{1}{10^{50}} | 0.0000001
        \pi | 3.14 | 3.141593000 | \frac{22}{7} | \frac{355}{113}
        \pi(R^2-r^2) | 0 | \pi(r^2-R^2) | \pi(R^2-R^2)
        """),
    "brackets, order and number of values": table(r"""
        (-\infty,3) | [-\infty,3) | (-\infty,3] | (\infty,3) | (-\infty,-3) | x \le 3 | (3,-\infty) | x>3
        [3,\infty) | x > 3 | x \le 3 | (3,\infty) | [3,\infty] | [-3,\infty) | x \geq 4 | \{3\} | 3
        16,3,1,1 | (16,3,1,1) | 16,3,1 | 16,16,3,1 | 16,3,3,1 | 16 | 16,3,1,1,1
        (1,2,3) | (2,3,1) | 2,3,1 | [1,2,3] | (1,2) | (1,2,3,4) | \{1,2,3\}
        (1,2) | 1,2 | (2,1) | [1,2] | [1,2) | (1,2] | 1 | 2,1
        5 | 5 \text{ or } 6 | 5 \text{ or 6} | 5 or 6 | 5, 6 | \{5,6\} | 5 \pm 1 | \pm 5 | 5 and 6 | (5,6) | [5,6]
        5 | 5; 6 | 5/6 | 6 \text{ or } 5 | 5, x=6
        1 \pm \sqrt{19} | 1+\sqrt{19} | 1-\sqrt{19} | -1 \pm \sqrt{19} | 1 \pm 19
        1,-2 | 1 | -2 | 1,2 | -1,2 | 1,-2,3 | 1,-2,-2 | [1,-2]
        (-\infty, 2) \cup (3, \infty) | (-\infty,2) | (-\infty,2]\cup(3,\infty) | (-\infty,3)\cup(2,\infty) | x<2
        (-\infty, 2) \cup (3, \infty) | x \neq 2 | (-\infty,2) \cap (3,\infty)
        \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix}
        \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
        \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 3 \end{pmatrix}
        $48$, $384$ | 48 | 384 | 432 | 48, 385
        """),
    "units, choices and words": table(r"""
        10 | 10x | 10 m | 10 \text{ or eleven} | 10 \text{, } 11 | 100 cents | dollars | 10^2
        2t | 2 | t | 2s | 2t^2
        20 $cm^{2}$ | 20 cm^3 | 21 cm^2 | 20^2
        864 \mbox{ inches}^2 | 864 \text{ inches}^3 | 865
        \text{(B)} | C | (A) | \textbf{(C)}\ 12 | A, B | (A) or (B) | B and C | (B)x | B1 | b | AB | 12
        \text{(B)} | \text{Because} | (B) or (C) | (B)(C)
        \textbf{(B)}\ 12 | C | 13 | \textbf{(C)}\ 12 | (B) or (C) | A
        B | C. | \textbf{(A)}\ 12 | A B | B C | BC | B=C | Bob
        \text{east} | west | \text{seat} | seat | eas | easter | teas | \text{north east}
        Quadrant I | Quadrant II | Quadrant | Quadrant IV
        I(0) | I(1) | I | 0
        \text{even} | odd | \text{not even} | neve
        52_8 | 52_9 | 53_8 | 42 | 52_{16} | 52
        4210_{5} | 4210_{6} | 4211_5 | 555
        90^\circ | 91^\circ | 9^\circ | \frac{\pi}{2}
        50 | 51\% | 0.5
        12.5 | 12.6\% | 0.125 | 125\%
        """),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RIGHT)
def test_right_answers_in_other_forms(kind):
    assert len(RIGHT[kind]) >= 20
    assert [pair for pair in RIGHT[kind] if not equal(*pair)] == []
    golds = {gold for gold, _ in RIGHT[kind]}
    assert [gold for gold in golds if not equal(gold, gold + " ")] == []


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_answers_are_wrong_and_no_errors(kind):
    assert len(WRONG[kind]) >= 20
    assert [pair for pair in WRONG[kind] if judge(*pair)] == []


def test_order_counts_where_it_is_asked_for():
    assert equal("1,2,3", "2,3,1") and not equal("1,2,3", "2,3,1", ordered=True)
    assert equal("1,2,3", "1, 2, 3", ordered=True) and equal("1,2,3", "1, 2 and 3", ordered=True)
    assert not equal("1,2,3", "(1,2,3)", ordered=True)  # a point
    assert equal(r"\{1,2,3\}", r"\{3,2,1\}", ordered=True)  # a set has no order


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{x \} y}", r"x \} y"),
        (r"\boxed{\{ 1}", r"\{ 1"),
        (r"-\boxed{256}", "-256"),
        (r"$x = -\boxed{256}$", "-256"),
        (r"so \(-\boxed{\frac{1}{2}}\)", r"-\frac{1}{2}"),
        (r"= - \boxed{x+1}", "-(x+1)"),
        (r"5 -\boxed{3}", "3"),
        ("\n- \\boxed{3}", "3"),
        (r"a-\boxed{3}", "3"),
        (r"(5)-\boxed{3}", "3"),
        (r"$2$ -\boxed{3}", "-3"),
        (r"\boxed{3} and \boxed{4}", "3, 4"),
        (r"$\boxed{3}$, $\boxed{4}$ and $\boxed{5}$", "3, 4, 5"),
        (r"\boxed{3}\text{ or }\boxed{4}", "3, 4"),
        (r"$x=\boxed{3}$ and $y = -\boxed{4}$", "3, -4"),
        (r"\boxed{3}. Then \boxed{4}", "4"),
        (r"\boxed{3}, so it is \boxed{4}", "4"),
        (r"\boxed{3} \boxed{4}", "4"),
        (r"\boxed{3} and then, after long and careful thought about it and more, \boxed{4}", "4"),
    ],
)
def test_what_belongs_to_a_box(text, answer):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("#### **18**", "18"),
        (r"#### \$18", "18"),
        ("#### $18$", "18"),
        ("#### -$18", "-18"),
        ("#### **-1,018.50** dollars", "-1,018.50"),
        ("#### __18__.", "18"),
        ("#### $-18", "-18"),
        ("#### 5-3", None),
        ("#### --5", None),
        ("#### **5** or 6", None),
    ],
)
def test_what_may_stand_about_a_number(text, answer):
    assert hash_answer(text) == answer


def test_gold_fields_in_dollars():
    assert [final_answer(text) for text in ("$5$", "$5$.", " $x^2$. ", "$2$ or $3$", "5.")] == [
        "5",
        "5",
        "x^2",
        "$2$ or $3$",
        "5.",
    ]


# ---- costs


def matrix(kind: str, size: int) -> str:
    rows = ("&".join(str((7 * i + 3 * j) % 11) for j in range(size)) for i in range(size))
    return rf"\begin{{{kind}matrix}}" + r"\\".join(rows) + rf"\end{{{kind}matrix}}"


BOMBS = table(r"""
    3 | 2^{10\cdot10^9} | 2^{\sqrt{10^{30}}} | \binom{10000000}{5000000} | \Gamma(10^6) | 9^{9^{9^9}} | (10^9)!
    3 | 10**10**10 | 2^{-10^{9}} | 99999! | 20!!! | \left(9^9\right)^{(9^9)} | \binom{999\cdot999}{500000} | x^{10^6}
    3 | \Gamma(999\cdot 999) | \gcd(9^{9^9},6) | \operatorname{eye}(10000) | e^{e^{e^{e^{e}}}}
    3 | \sum_{k=1}^{10^9} k | \int_0^1 e^{x^2} dx
    3 | 9^{9^{9}x}|_{x=1} | \lfloor 10^{10^{10}} \rfloor | 0\cdot 10^{10^{10}} | (x+y+z)^{10^{10}}
    """) + [
    ("3", text)
    for text in (
        matrix("v", 8),
        r"\det" + matrix("p", 8),
        matrix("p", 9),
        matrix("p", 4) + "^{1000000}",
        r"\frac{" * 60 + "1" + "}{2}" * 60,
        "|x|" * 100,
        "-" * 500 + "1",
        "1e" + "9" * 500,
    )
]
HEAVY = [
    ("3", text)
    for text in (  # allowed, or seen to be wrong at once, and cheap
        r"(1+i)^{5000}",
        "(" * 200 + "x" + ")" * 200,
        "1000!",
        "7000!",
        ",".join(map(str, range(250))),
        r"\cup".join(f"({i},{i}.5)" for i in range(60)),
        "1e999999999",
        r"2^{2^{16}}",
        "(-1)^{10^{10}}",
        r"\binom{2000}{1000}",
        matrix("v", 4),
        r"\sin(10^{10000})",
        "x=1=" * 200 + "2",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("bombs, judged", [(BOMBS, False), (HEAVY, True)])
def test_bombs_cost_nothing(bombs, judged):
    equal("x+1", "1+x")  # imports
    slow = []
    for gold, answer in bombs:
        start = time.process_time()
        if judged:
            assert not equal(gold, answer)
        else:
            with pytest.raises(Unjudged):
                equal(gold, answer)
        if time.process_time() - start > 10.0:  # a bomb costs minutes
            slow.append(answer[:60])
    assert not slow and equal(bombs[0][1], bombs[0][1])


@pytest.mark.slow
def test_how_long_an_answer_may_be():
    assert (
        equal("3", "3" + " " * 2000)
        and equal("3", "0" * 999 + "3")
        and not equal("3", "0" * 1000 + "3")
    )
    long = "+".join(["x"] * 300)
    assert (
        len(long) == 599
        and equal(long, "+".join(["x "] * 300) + "+0" * 149)
        and not equal(long, "0" * 1300)
    )
    assert equal(long, "0+" * 299 + long) and not equal(long, "0+" * 300 + long)


@pytest.mark.parametrize(
    "most, more",
    [
        (r"\binom{9999}{2}", r"\binom{10000}{2}"),
        (r"\Gamma(8000)", r"\Gamma(10000)"),
        (r"\binom{3\cdot 2499}{2}", r"\binom{3\cdot 2500}{2}"),
        ("2^{100000}", "2^{100001}"),
        ("4^{-50000}", "4^{-50001}"),
        ("3^{2^{15}}", "3^{2^{16}}"),
        ("x^{50000}", "x^{50001}"),
        ("1^{10^{1000}}", "1^{10^{10^6}}"),
        ("(" + "(-" * 19 + "x" + ")" * 20 + "+1", "(" + "(-" * 20 + "x" + ")" * 21 + "+1"),
        ("+".join(["|x|"] * 8), "+".join(["|x|"] * 9)),
        (matrix("v", 4), matrix("v", 5)),
        (r"\det" + matrix("p", 4), r"\det" + matrix("p", 5)),
        (matrix("p", 8), matrix("p", 8).replace(r"\end", r"\\1\end")),
    ],
)
def test_sizes_at_their_edges(most, more):
    assert equal("3", most) is False
    with pytest.raises(Unjudged, match="Costly"):
        equal("3", more)


@pytest.mark.parametrize(
    "gold, same, other",
    [
        (r"\frac{1}{2004!}", r"1/2004!", r"\frac{1}{2005!}"),
        ("10^{10^{10}}", "10^{(10^{10})}", "10^{10^{11}}"),
        ("2^{2^{2005}}", r"{2}^{2^{2005}}", "2^{2^{2006}}"),
        (r"\binom{100}{50}", r"\frac{100!}{50!50!}", r"\binom{100}{49}"),
        (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}", r"\frac{n(n-1)}{2}"),
    ],
)
def test_large_and_unfinished_golds_are_judged(gold, same, other):
    assert equal(gold, same) and not judge(gold, other) and not judge(gold, "3")


def test_time_for_an_answer_is_bounded_and_then_it_is_wrong(monkeypatch):
    from lowroll.envs.answers import equality, expressions

    monkeypatch.setattr(equality, "MAX_SECONDS", 0.1)

    def spin(*_):
        while True:
            try:
                while True:
                    re.match("a", "b")
            except Exception:  # what is swallowed on the way must not save it
                continue

    monkeypatch.setattr(expressions, "compare", spin)
    start = time.process_time()
    with pytest.raises(Unjudged, match="AnswerTimeout"):
        equal("x+1", "x+2")
    assert time.process_time() - start < 1.0
    monkeypatch.setattr(expressions._Reader, "parse", spin)
    with pytest.raises(expressions.GoldError, match="takes too long to read: 'x\\+77'"):
        equal("x+77", "x+2")  # a gold answer that fails is an error


@pytest.mark.slow
def test_a_thousand_ordinary_scorings():
    code = r"""
import random, time
from lowroll.envs.answers.equality import equal, Unjudged
start, rng = time.process_time(), random.Random(0)
kinds = [lambda: f"{rng.randrange(9999)}", lambda: f"{rng.randrange(99)}.{rng.randrange(99)}",
         lambda: r"\frac{%d}{%d}" % (rng.randrange(99), rng.randrange(2, 99)), lambda: r"%d\sqrt{%d}" % (
         rng.randrange(99), rng.randrange(99)), lambda: f"({rng.randrange(9)},{rng.randrange(9)})",
         lambda: f"x^2+{rng.randrange(99)}x-{rng.randrange(99)}", lambda: f"{rng.randrange(9)}, {rng.randrange(9)}"]
for i in range(1000):
    kind = kinds[0] if i % 2 else rng.choice(kinds)
    equal(kind(), kind())
print(time.process_time() - start)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=100,
    )
    assert float(done.stdout) < 10


def test_no_text_of_an_answer_is_evaluated_as_python(tmp_path, monkeypatch):
    import builtins

    import sympy.physics.units  # evaluates its own names when it is imported  # noqa: F401

    canary = tmp_path / "canary"
    payloads = [
        f"__import__('os').system('touch {canary}')",
        f"open('{canary}','w')",
        rf"\text{{open('{canary}','w')}}",
        "exec(chr(120))",
        r"\operatorname{eval}(1)",
        "x.__class__",
        "lambda: 1",
        "1;import os",
        "0x10",
        "1_0",
    ]
    seen = []
    run = builtins.eval
    monkeypatch.setattr(
        builtins, "eval", lambda code, *scope: seen.append(code) or run(code, *scope)
    )
    for gold in (
        "3",
        "x+1",
        r"\frac{1}{2}",
        "(1,2)",
        "x^2=4",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        "f(x)=1,000",
    ):
        for payload in [
            *payloads,
            "3+0.5x",
            r"\gcd(4,6)",
            r"\frac{d}{dx} x^2",
            "f(7)",
            r"\{7, 8\}",
            r"\sqrt[3]{7}",
            "f(x)=1,234",
            "1,234.5",
            "4.5e3",
            r"0.\overline{7}",
        ]:
            judge(gold, payload)
    assert not canary.exists() and [code for code in seen if isinstance(code, str)] == []


# ---- real gold answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, limit",
    [
        ("gsm8k_test.jsonl", 300),
        ("math500.jsonl", 150),
        ("minerva_math.jsonl", 30),
        ("gaokao2023en.jsonl", 150),
    ],
)
def test_gold_answers_in_their_usual_forms_and_near_misses(file, limit):
    if not (DATA / file).is_file():
        pytest.skip(f"no {file} in {DATA} (set LOWROLL_DATA)")
    count = scoring.score_file(DATA / file, scoring.FILES[file], limit)
    assert count.forms > 10 * limit and count.misses > 3 * limit
    assert (count.refused, count.accepted, count.errors) == (0, 0, 0), count.examples


def test_the_sweep_counts_what_is_wrong(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_text(
        '{"problem": "q", "answer": "27"}\n{"problem": "q", "answer": "9"}\n'
    )
    monkeypatch.setattr(scoring, "FILES", {"a.jsonl": "math"})
    assert scoring.main(["--data", str(tmp_path)]) == 0
    assert re.search(
        r"a.jsonl: \d\d forms, 0 refused; \d\d near misses, 0 accepted; 0 errors",
        capsys.readouterr().out,
    )
    monkeypatch.setattr("lowroll.envs.problems.equal", lambda gold, answer, ordered: answer != "28")
    count = scoring.score_file(tmp_path / "a.jsonl", "math", limit=1)
    assert count.refused == 0 and count.accepted == count.misses - 1 > 5 and not count.ok
    monkeypatch.setattr("lowroll.envs.problems.equal", lambda gold, answer, ordered: 1 / 0)
    count = scoring.score_file(tmp_path / "a.jsonl", "math")
    assert (
        count.refused == count.forms and count.errors == count.forms + count.misses and not count.ok
    )
    assert (
        scoring.main(["--data", str(tmp_path)]) == 1
        and "ZeroDivisionError" in capsys.readouterr().out
    )


def test_a_number_may_be_equal_to_one_that_is_not_written_exactly() -> None:
    assert equal("1", r"\sqrt{3+2\sqrt{2}}-\sqrt{2}") and equal(r"\sqrt{3+2\sqrt{2}}-\sqrt{2}", "1")
    assert not equal("1", r"\sqrt{3+2\sqrt{2}}-\sqrt{3}")


def test_a_matrix_is_no_number_and_a_number_no_matrix() -> None:
    assert not expressions.compare(sympy.Matrix([1, 2]), sympy.Integer(5))
    assert not expressions.compare(sympy.Integer(5), sympy.Matrix([1, 2]))


def test_the_warning_of_a_judge_whose_limits_are_off_is_not_shown(caplog):
    """`costs` limits the time of a comparison."""
    for module in ("parser", "grader"):
        logger = logging.getLogger(f"math_verify.{module}")
        logger.warning("Timeout is disabled as timeout_seconds is None")
        logger.warning("of another kind")
    assert [record.getMessage() for record in caplog.records] == ["of another kind"] * 2
