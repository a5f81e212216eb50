"""Colours and layout of every report, light and dark."""

from __future__ import annotations

# Each name has a light and a dark value; figures (demo/svg.py) use the same names.
LIGHT = {
    "paper": "#ffffff", "card": "#f6f7f9", "ink": "#1c2330", "muted": "#5f6878", "grid": "#e3e6eb",
    "shade": "#1c233038", "own": "#eaf1fe", "good": "#15803d", "bad": "#b91c1c", "warn": "#92580a",
    "series-0": "#8a93a3", "series-1": "#c2620a", "series-2": "#2563eb", "series-3": "#0d8a7d", "series-4": "#be185d",
    "series-5": "#7c3aed", "series-6": "#7a5c1e", "series-7": "#5f6878", "heat": "37, 99, 235",
    "k": "#7c3aed", "s": "#15803d", "c": "#6b7484", "n": "#b45309",
}  # fmt: skip
DARK = {
    "paper": "#12151b", "card": "#1a1f28", "ink": "#e6e9ef", "muted": "#98a2b3", "grid": "#2c3340",
    "shade": "#98a2b350", "own": "#1b2740", "good": "#4ade80", "bad": "#f87171", "warn": "#f0b072",
    "series-0": "#98a2b3", "series-1": "#f59e42", "series-2": "#6ea0ff", "series-3": "#2dd4bf", "series-4": "#f472b6",
    "series-5": "#b794f6", "series-6": "#d6b56b", "series-7": "#98a2b3", "heat": "96, 148, 255",
    "k": "#b794f6", "s": "#7ee2a8", "c": "#8a94a6", "n": "#f0b072",
}  # fmt: skip


def _values(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in palette.items())


def shadows(box: str) -> str:
    """CSS of a box of colour ``box`` that scrolls: a shadow at each edge behind which there is more. The shadows stay
    where they are; covers of the box's own colour, which move with the content, hide them at its ends."""
    sides = {"right": "left / {} 100%", "left": "right / {} 100%", "bottom": "top / 100% {}", "top": "bottom / 100% {}"}
    layers = [
        f"linear-gradient(to {to}, var(--{box}) 40%, transparent) {at.format('3rem')} no-repeat local"
        for to, at in sides.items()
    ]
    layers += [
        f"linear-gradient(to {to}, var(--shade), transparent) {at.format('.8rem')} no-repeat scroll"
        for to, at in sides.items()
    ]
    return f"background: {', '.join(layers)}; background-color: var(--{box});"


STYLE = f"""\
:root {{ color-scheme: light dark; {_values(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_values(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; overflow-wrap: break-word; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.2rem 4rem; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.02em; }}
h2 {{ font-size: 1.35rem; margin: 3.2rem 0 .6rem; letter-spacing: -.01em; }}
h3 {{ font-size: 1rem; margin: 1.6rem 0 .3rem; }}
p, ul.words {{ margin: .5rem 0 1rem; max-width: 46rem; }}
ul.words {{ padding-left: 1.2rem; }}
a {{ color: var(--series-2); }}
.lead {{ font-size: 1.12rem; }}
.note, figcaption, ul.note, caption {{ color: var(--muted); font-size: .9rem; }}
caption {{ text-align: left; padding: .2rem 0 .4rem; }}
.good {{ color: var(--good); font-weight: 600; }}
.bad {{ color: var(--bad); font-weight: 600; }}
.warn {{ color: var(--warn); }}
.contents {{ margin: 1.4rem 0; font-size: .95rem; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }}
.contents a {{ text-decoration: none; }}
.contents a:hover {{ text-decoration: underline; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 195px), 1fr)); gap: .9rem;
  margin: 1.6rem 0; }}
.tile {{ background: var(--card); border-radius: 12px; padding: .9rem 1.1rem; }}
.tile b {{ display: block; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: tabular-nums; }}
.tile span {{ color: var(--muted); font-size: .88rem; line-height: 1.4; display: block; }}
.pair {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.2rem;
  align-items: start; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 1.2rem; }}
.card {{ background: var(--card); border-radius: 12px; padding: 1rem 1.1rem; min-width: 0; }}
.card h3, .pair h3 {{ margin-top: 0; }}
figure {{ margin: .6rem 0; max-width: 560px; }}
figure.wide {{ max-width: none; overflow-x: auto;
  {shadows("paper")} }}
figure svg {{ width: 100%; height: auto; display: block; overflow: visible; }}
figure.wide svg {{ width: auto; }}
figure svg text {{ font-family: inherit; }}
.scroll {{ overflow-x: auto; margin: .6rem 0 1rem;
  {shadows("paper")} }}
table {{ border-collapse: separate; border-spacing: 0; font-size: .88rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }}
th {{ color: var(--muted); font-weight: 600; white-space: normal; vertical-align: bottom; }}
tbody th {{ vertical-align: top; }}
th:first-child, td:first-child {{ padding-left: 0; }}
td small {{ display: block; color: var(--muted); font-size: .78rem; line-height: 1.2; }}
td.wraps {{ white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }}
.name {{ text-align: left; }}
.whole {{ white-space: nowrap; }}
tr.own td {{ background: var(--own); font-weight: 600; }}
tr.own td small {{ font-weight: 400; }}
tr.quiet td {{ color: var(--muted); }}
td.heat {{ border: 1px solid var(--paper); }}
.scale {{ display: flex; align-items: center; gap: .6rem; color: var(--muted); font-size: .85rem; flex-wrap: wrap; }}
.scale i {{ width: 12rem; height: .8rem; border-radius: 4px; border: 1px solid var(--grid);
  background: linear-gradient(to right, rgba(var(--heat), 0), rgba(var(--heat), .6)); }}
pre {{ border-radius: 12px; padding: 1rem 1.1rem; overflow-x: auto; font: 13px/1.5 ui-monospace,
  SFMono-Regular, Menlo, Consolas, monospace; margin: .6rem 0;
  {shadows("card")} }}
pre.long {{ max-height: 26rem; overflow-y: auto; margin-bottom: .2rem; }}
.k, .kn, .kc, .ow {{ color: var(--k); }} .s1, .s2, .sd {{ color: var(--s); }} .c1, .ch {{ color: var(--c); }}
.mi, .mf, .nd {{ color: var(--n); }}
.key {{ display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }}
details summary {{ cursor: pointer; color: var(--series-2); }}
@media (max-width: 640px) {{ /* whose row it is stays in sight */
  .scroll :is(th, td).name:first-child {{ position: sticky; left: 0; background: var(--paper);
    box-shadow: 1px 0 var(--grid); }}
  .scroll tr.own td.name:first-child {{ background: var(--own); }} }}
@media print {{ .tile, .card, pre {{ border: 1px solid var(--grid); }} pre.long {{ max-height: none; }} }}
"""
