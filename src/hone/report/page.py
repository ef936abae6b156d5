"""The report's page: its style, its script, and a policy that lets nothing else run or load."""

import base64
import hashlib
from html import escape

STYLE = """
:root{color-scheme:light dark;--bg:#f6f6f3;--card:#fff;--ink:#1b1d20;--soft:#5d646c;--line:#e2e3de;--grid:#ecece8;
--good:#15714a;--good-bg:#e0f3e9;--bad:#b3293c;--bad-bg:#fbe6e8;--think:#f1f0ea;--answer:#fff0c2;
--s0:#2b68d0;--s1:#b8590b;--s2:#177f52;--s3:#7546c8;--s4:#b93463;--s5:#0a7688}
@media (prefers-color-scheme:dark){:root{--bg:#101214;--card:#191c1f;--ink:#e7e9ec;--soft:#9ba3ac;--line:#2c3136;
--grid:#24282c;--good:#5fd39d;--good-bg:#12301f;--bad:#ff8d98;--bad-bg:#3a1a1f;--think:#22262a;--answer:#4a3b0c;
--s0:#75abff;--s1:#f0a252;--s2:#4fc68d;--s3:#b797f7;--s4:#f27da3;--s5:#4bc0d4}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;margin:4px 0 6px;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.01em;margin:44px 0 4px}
h3,h4{font-size:14px;margin:0}
p{margin:0}.lead,.hint{color:var(--soft)}.hint{font-size:13px;margin-bottom:14px}
.brand{font-size:12px;font-weight:650;letter-spacing:.1em;text-transform:uppercase;color:var(--s0)}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}.s5{--c:var(--s5)}
.card,.problem{background:var(--card);border:1px solid var(--line);border-radius:12px}
.facts-row{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin-top:26px}
.fact{padding:16px 18px}.fact span{display:block;color:var(--soft);font-size:13px}
.fact b{display:block;font-size:27px;line-height:1.3;letter-spacing:-.02em;font-weight:650}
.scroll{overflow-x:auto;margin-top:12px}
.reasons .reason{text-align:left;white-space:normal;min-width:22em;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}
th,td{padding:11px 18px;text-align:right;border-top:1px solid var(--line);white-space:nowrap}
thead th{border-top:0;color:var(--soft);font-size:13px;font-weight:550}
th:first-child,td:first-child{text-align:left;white-space:normal}tbody th{font-weight:600}
tbody th::before{content:"";display:inline-block;width:9px;height:9px;border-radius:3px;background:var(--c);
margin-right:9px}
.bar{display:inline-block;vertical-align:middle;width:84px;height:7px;margin-right:12px;border-radius:4px;
overflow:hidden}
td span{display:inline-block;min-width:3.6em}
.bar .rest{fill:var(--grid)}.bar .part{fill:var(--c)}
.tabs{display:none;flex-wrap:wrap;gap:6px;margin:4px 0 14px}.js .tabs:not([hidden]){display:flex}
.tabs button{font:inherit;font-weight:550;color:var(--soft);background:none;border:1px solid var(--line);
border-radius:999px;
padding:5px 15px;cursor:pointer}.tabs button:hover{color:var(--ink)}
.tabs button[aria-selected=true]{color:var(--card);background:var(--c);border-color:var(--c)}
:focus-visible{outline:2px solid var(--s0);outline-offset:2px}
.js .panel>h3{display:none}.panel>h3{margin:18px 0 8px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:14px}
figure{margin:0;padding:14px 14px 8px;min-width:0}
figcaption{display:flex;justify-content:space-between;gap:10px;font-size:13px;font-weight:600;padding:0 4px 4px}
figcaption span{overflow-wrap:anywhere}figcaption b{font-weight:600;color:var(--c);white-space:nowrap}
figcaption em{font-style:normal;font-weight:550;color:var(--bad);white-space:nowrap}
figure svg{display:block;width:100%;height:auto;touch-action:pan-y}
svg text{font-size:10px;fill:var(--soft)}svg .y{text-anchor:end}svg .x{text-anchor:middle}svg .end{text-anchor:end}
svg .grid{stroke:var(--grid)}svg polyline{fill:none;stroke:var(--c);stroke-linejoin:round;stroke-linecap:round}
svg .raw{stroke-width:1;opacity:.34}svg .mean{stroke-width:1.8}svg .one{fill:var(--c)}svg .lost{stroke:var(--bad);
stroke-width:1.5}
svg .cursor,svg .dot{visibility:hidden}svg.on .cursor,svg.on .dot{visibility:visible}
svg .cursor{stroke:var(--soft);stroke-dasharray:2 3}svg .dot{fill:var(--c);stroke:var(--card);stroke-width:1.5}
.tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--bg);border-radius:7px;
padding:4px 9px;
font-size:12px;white-space:nowrap}.tip b{font-weight:650}
.scroll+.charts{margin-top:14px}.charts+h3,details+h3{margin:22px 0 10px}.singles{margin-top:10px}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft);font-size:13px;padding:4px 0 10px}
.problem{margin-top:14px;overflow:hidden}
.problem>header{display:flex;flex-wrap:wrap;gap:6px 18px;align-items:baseline;padding:14px 18px;
border-bottom:1px solid var(--line)}
.prompt{flex:1 1 260px;min-width:0;font-weight:550;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;
max-height:15em;overflow-y:auto}
.singles{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr));gap:0 14px}
.singles .problem{display:flex;flex-direction:column}.singles .answers{flex:1}
.gold{color:var(--soft);font-size:13px}.gold b{color:var(--ink)}
.answers{display:flex;flex-wrap:wrap;margin:0 -1px -1px 0}
.answer-box{flex:1 1 min(260px,100%);padding:12px 18px 12px;min-width:0;display:flex;flex-direction:column;
border-top:3px solid var(--c);border-right:1px solid var(--line);border-bottom:1px solid var(--line)}
.of2 .answer-box{flex-basis:max(260px,40%)}.of3 .answer-box{flex-basis:max(260px,30%)}
h4{display:flex;justify-content:space-between;gap:8px;align-items:baseline;color:var(--c)}
h4 span{overflow-wrap:anywhere}h4 small{color:var(--soft);font-weight:450;margin-left:4px}
.badge{font-size:12px;font-weight:600;border-radius:999px;padding:1px 10px;white-space:nowrap}
.good{color:var(--good);background:var(--good-bg)}.bad{color:var(--bad);background:var(--bad-bg)}
pre{margin:10px 0;font:13px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre-wrap;
overflow-wrap:anywhere;max-height:26em;overflow-y:auto;flex:1;unicode-bidi:isolate}
pre i{font-style:normal;color:var(--soft);font-size:11px}
.think,.answer{border-radius:4px;padding:2px 4px;-webkit-box-decoration-break:clone;box-decoration-break:clone}
.think{background:var(--think);color:var(--soft)}.answer{background:var(--answer);font-weight:600}
.facts,.none{color:var(--soft);font-size:13px}.facts b{color:var(--ink)}.none{padding:18px 4px}
dl{display:grid;grid-template-columns:minmax(120px,max-content) 1fr;margin:12px 0 0;padding:8px 18px}
dt,dd{padding:7px 0;margin:0;border-top:1px solid var(--line);overflow-wrap:anywhere;white-space:pre-wrap}
dt{color:var(--soft);padding-right:28px}dt:first-of-type,dd:first-of-type{border-top:0}
footer{margin-top:44px;color:var(--soft);font-size:13px}
@media (max-width:640px){main{padding:24px 14px 48px}h1{font-size:24px}.facts-row{grid-template-columns:1fr 1fr;
gap:10px}
.fact{padding:12px 14px}.fact b{font-size:22px}thead{position:absolute;clip-path:inset(50%);height:1px;
overflow:hidden}
tr{display:block;padding:8px 0;border-top:1px solid var(--line)}tbody tr:first-child{border-top:0}
tbody th,td{display:flex;justify-content:space-between;align-items:center;border:0;padding:4px 16px}
tbody th{justify-content:flex-start;padding-bottom:6px}
td::before{content:attr(data-name);color:var(--soft);margin-right:auto}
.charts{grid-template-columns:1fr}dl{grid-template-columns:1fr}dt{padding-bottom:0}dd{border:0;padding-top:0}}
@media print{body{background:#fff}.tabs{display:none!important}.panel[hidden]{display:block!important}
.js .panel>h3{display:block}.card,.problem{break-inside:avoid}pre,.prompt{max-height:none}}
"""

SCRIPT = """
(function () {
  document.documentElement.classList.add("js");
  var tabs = Array.from(document.querySelectorAll("[role=tab]"));
  function choose(tab) {
    tabs.forEach(function (other) {
      var on = other === tab;
      other.setAttribute("aria-selected", on);
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
    });
  }
  tabs.forEach(function (tab, i) {
    tab.addEventListener("click", function () { choose(tab); });
    tab.addEventListener("keydown", function (event) {
      var move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      var next = tabs[(i + move + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
  if (tabs.length) choose(document.querySelector("[role=tab].best") || tabs[tabs.length - 1]);

  var tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.appendChild(tip);
  document.querySelectorAll("svg[data-points]").forEach(function (svg) {
    var points = svg.dataset.points.split(";").map(function (p) { return p.split("|"); });
    var line = svg.querySelector(".cursor"), dot = svg.querySelector(".dot");
    function hide() { svg.classList.remove("on"); tip.hidden = true; }
    svg.addEventListener("pointermove", function (event) {
      var box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      var x = (event.clientX - box.left) / scale;
      var near = points.reduce(function (a, b) { return Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a; });
      line.setAttribute("x1", near[0]);
      line.setAttribute("x2", near[0]);
      dot.setAttribute("cx", near[0]);
      dot.setAttribute("cy", near[1]);
      svg.classList.add("on");
      tip.textContent = "step " + near[2] + "   ";
      tip.appendChild(document.createElement("b")).textContent = near[3];
      tip.hidden = false;
      var left = box.left + near[0] * scale - tip.offsetWidth / 2;
      tip.style.left = Math.max(6, Math.min(left, innerWidth - tip.offsetWidth - 6)) + "px";
      tip.style.top = box.top + near[1] * scale - tip.offsetHeight - 12 + "px";
    });
    svg.addEventListener("pointerleave", hide);
    addEventListener("scroll", hide, { passive: true });
  });
})();
"""


CONTROLS = {i: 0x2400 + i for i in range(32) if i not in (9, 10)} | {127: 0x2421}


def text(value: object) -> str:
    """Escaped for HTML text and attributes; control characters become visible ones."""
    return escape(str(value).replace("\r\n", "\n").translate(CONTROLS))


def page(title: str, body: str) -> str:
    """A whole document. Its policy names the hashes of our style and script: nothing else runs, nothing loads."""
    policy = (
        f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
