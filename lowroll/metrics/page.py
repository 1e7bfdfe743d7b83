"""The report page's frame, style, script, and escaping of untrusted text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPORT_FILE = "report.html"


def escape(value: object, limit: int) -> str:
    """Escape `value` as HTML, cut to `limit` characters, with visible control characters."""
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]} … ({len(text) - limit} more characters)"
    text = "".join(
        char if char in "\n\t" or (char.isprintable() or char == " ") else f"\\x{ord(char):02x}"
        for char in text
    )
    return html.escape(text)


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return chat messages as lines."""
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in messages)


def gold_answer(info: Mapping[str, Any]) -> str:
    """Return the answer in a scorer's data, else the data as JSON."""
    if "answer" in info:
        return str(info["answer"])
    return json.dumps(info, ensure_ascii=False) if info else "none is stored"


def page(title: str, body: str) -> str:
    """Return a document whose policy allows this file's script and no requests."""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(SCRIPT)}'"
    return _FRAME.format(title=title, policy=policy, style=STYLE, body=body, script=SCRIPT)


def is_report(path: Path) -> bool:
    """Return whether a file is a page of this module."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(2000)
    return (
        beginning.startswith(_FRAME.partition("{title}")[0].encode())
        and b"Content-Security-Policy" in beginning
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# the page is complete without it
SCRIPT = """
const box = document.getElementById("search");
if (box) {
  const samples = [...document.querySelectorAll(".sample")];
  box.hidden = false;
  box.addEventListener("input", () => {
    const wanted = box.value.toLowerCase();
    let found = 0;
    for (const sample of samples) {
      sample.hidden = !sample.textContent.toLowerCase().includes(wanted);
      found += !sample.hidden;
    }
    for (const step of document.querySelectorAll(".step")) {
      step.hidden = !step.querySelector(".sample:not([hidden])");
      if (wanted && !step.hidden) step.open = true;
    }
    document.getElementById("found").textContent = wanted ? `${found} of ${samples.length} samples` : "";
  });
}
"""
_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>{style}</style></head><body><main>
{body}
</main><script>{script}</script></body></html>
"""
STYLE = """
:root{color-scheme:light dark;--ink:#1d232b;--soft:#5d6876;--line:#dde2e8;--page:#fbfbfa;--card:#fff;--mark:#3b7dd8}
@media (prefers-color-scheme:dark){:root{--ink:#e4e7eb;--soft:#9aa5b1;--line:#333a43;--page:#15181c;--card:#1c2026}}
*{box-sizing:border-box}[hidden]{display:none!important}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 8px}
.sub{margin:4px 0 16px;color:var(--soft);overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:0;font-size:14px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px;margin:26px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px;display:flex;
flex-direction:column}
.tile span,.tile small{color:var(--soft);font-size:12.5px}
.tile b{font-size:19px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px 6px}
figcaption{font-size:13px;color:var(--soft);margin-bottom:4px}figcaption b{color:var(--ink);font-size:15px}
svg{display:block;width:100%;max-width:600px;margin:0 auto;height:auto;color:var(--ink)}
svg text{font-family:inherit!important}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:6px 10px;border-top:1px solid var(--line)}
th{font-weight:600;color:var(--soft)}
.change{font-size:14px;width:auto;min-width:min(100%,640px)}.change td b{font-size:16px}
.change small,.facts small{color:var(--soft);display:block}
.num{font-variant-numeric:tabular-nums;white-space:nowrap}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}
code{font:12.5px ui-monospace,Menlo,Consolas,monospace;white-space:nowrap}
.wide{overflow-x:auto}
details{margin-top:32px}summary{cursor:pointer;font-size:19px;font-weight:600;margin-bottom:8px}
details.step{margin-top:14px}.step>summary{font-size:14px;color:var(--soft)}
.sample{margin:0 0 6px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:6px 12px}
.sample>summary{font-size:13px;font-weight:400;margin:0;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.sample>summary i{color:var(--soft);font-style:normal;margin:0 6px 0 2px}
.sample h4{font-size:12px;color:var(--soft);font-weight:600;margin:10px 0 2px}
.sample pre{max-height:360px;overflow-y:auto}
.sample p{font-size:12.5px;color:var(--soft);margin:10px 0 4px}
input[type=search]{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:6px 12px;width:min(100%,340px)}#found{color:var(--soft);font-size:13px;margin-left:10px}
details>pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
footer{margin-top:32px;color:var(--soft);font-size:13px;overflow-wrap:anywhere}footer ul{padding-left:18px;margin:0}
@media (max-width:600px){main{padding:20px 12px 48px}h1{font-size:21px}
dl{grid-template-columns:1fr}dd{margin-bottom:6px}
.tiles{grid-template-columns:repeat(2,1fr);gap:8px}.tile{padding:8px 10px}.tile b{font-size:16px;white-space:normal}
th,td{padding:5px 6px}figure{padding:10px 8px 4px}}
"""
