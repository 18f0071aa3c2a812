"""The style sheet of a report; light and dark, as the reader's system is."""

STYLE = """
:root{--ink:#16202c;--soft:#5d6b7a;--line:#dde3ea;--paper:#fff;--tint:#f5f7fa;--a:#1f6feb;--b:#d9730d;--good:#1a7f4b;
  --bad:#b3362b;--sim:#6b8fb5;--fwd:#d9a441}
@media (prefers-color-scheme:dark){
  :root{--ink:#e5eaf0;--soft:#9aa7b5;--line:#2e3945;--paper:#12181f;--tint:#1a222b;--a:#6aa5ff;--b:#f0a45a;
  --good:#54c08a;--bad:#ef7d72;--sim:#57799c;--fwd:#c79539}
}
*{box-sizing:border-box}
body{margin:0;background:var(--tint);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}
h2{font-size:13px;font-weight:600;text-transform:uppercase;letter-spacing:.06em;color:var(--soft);margin:0 0 12px}
.sub{color:var(--soft);margin:4px 0 24px}
.grid{display:grid;gap:16px;grid-template-columns:repeat(6,minmax(0,1fr))}
.card{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:18px 20px;min-width:0}
.wide{grid-column:span 6}.half{grid-column:span 3}.third{grid-column:span 2}
@media (max-width:820px){.half,.third{grid-column:span 6}}
.hero{font-size:46px;font-weight:650;line-height:1.1;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.facts{display:flex;flex-wrap:wrap;gap:4px 22px;margin-top:10px;color:var(--soft)}
.facts b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.interval{color:var(--soft)}q{color:var(--ink)}
.k{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.k0{background:var(--a)}
.k1{background:var(--b)}
.note{border-left:3px solid var(--a);padding:8px 14px;margin:0 0 10px;background:var(--paper);border-radius:0 8px 8px 0}
svg{width:100%;max-width:560px;height:auto;display:block;font-size:12px}
svg text{fill:var(--ink)}
svg .num,svg .axis{fill:var(--soft);font-size:11px}
svg .name,svg .strong{text-anchor:end}
svg .strong{font-weight:650}
svg line.grid{stroke:var(--line)}
.range{stroke-width:4;stroke-linecap:round;opacity:.35}
.s0 .range,.curve.s0{stroke:var(--a)}
.s1 .range,.curve.s1{stroke:var(--b)}
.s0 circle{fill:var(--a)}
.s1 circle{fill:var(--b)}
.curve{fill:none;stroke-width:2.2}
svg text.s0{fill:var(--a)}
svg text.s1{fill:var(--b)}
.t-simulate{fill:var(--sim);background:var(--sim)}
.t-forward{fill:var(--fwd);background:var(--fwd)}
.films{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(190px,1fr))}
figure{margin:0}
video,figure img{width:100%;aspect-ratio:1;object-fit:contain;background:#000;border-radius:8px;
  image-rendering:pixelated;display:block}
figcaption{font-size:12.5px;color:var(--soft);margin-top:5px}
.good{color:var(--good);font-weight:600}
.bad{color:var(--bad);font-weight:600}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13.5px}
th{text-align:left;font-weight:600;color:var(--soft)}
td,th{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right}
.hash{overflow-wrap:anywhere}
.scroll{overflow-x:auto}
summary{cursor:pointer}
footer{color:var(--soft);font-size:12.5px;margin-top:24px}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""
