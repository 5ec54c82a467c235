// The operator graph: dagre says where things are, SVG shows them. Each vertex is a link.

import { Graph, layout } from "./vendor/dagre/dagre.esm.js"
import { html, link } from "./parts.js"
import { duration, percent, rate } from "./format.js"

const WIDTH = 216, HEIGHT = 92, CHARACTERS = 24

const cut = text => text.length > CHARACTERS ? `${text.slice(0, CHARACTERS - 1)}…` : text

export function placed(nodes, direction) {
  const graph = new Graph()
  graph.setGraph({ rankdir: direction, nodesep: 22, ranksep: 46, marginx: 4, marginy: 4 })
  graph.setDefaultEdgeLabel(() => ({}))
  for (const node of nodes) graph.setNode(node.id, { width: WIDTH, height: HEIGHT })
  for (const node of nodes) for (const input of node.inputs || []) if (graph.hasNode(input.id)) graph.setEdge(input.id, node.id)
  layout(graph)
  const { width, height } = graph.graph()
  return { width: Number.isFinite(width) ? width : WIDTH, height: Number.isFinite(height) ? height : HEIGHT, at: id => graph.node(id), edges: graph.edges().map(edge => ({ ...edge, points: graph.edge(edge).points })) }
}

// Sources first, then what they feed; the plan of Flink's dialect has them the other way round.
export function ordered(nodes) {
  const depths = {}
  const byId = Object.fromEntries(nodes.map(node => [node.id, node]))
  const depth = id => depths[id] ??= byId[id] ? 1 + Math.max(0, ...(byId[id].inputs || []).map(input => depth(input.id))) : 0
  return nodes.map((node, at) => [depth(node.id), -at, node]).sort(([a, b], [c, d]) => a - c || b - d).map(([, , node]) => node)
}

// From the middle of one side to the middle of another, by way of where dagre leads around what is between.
function curve(edge, from, to, narrow) {
  const points = narrow
    ? [{ x: from.x, y: from.y + HEIGHT / 2 }, ...edge.points.slice(1, -1), { x: to.x, y: to.y - HEIGHT / 2 }]
    : [{ x: from.x + WIDTH / 2, y: from.y }, ...edge.points.slice(1, -1), { x: to.x - WIDTH / 2, y: to.y }]
  if (points.length === 3) points.splice(1, 1) // between neighbours the middle is only a kink
  return points.slice(1).reduce((path, { x, y }, at) => {
    const before = points[at]
    return narrow ? `${path}C${before.x} ${(before.y + y) / 2} ${x} ${(before.y + y) / 2} ${x} ${y}` : `${path}C${(before.x + x) / 2} ${before.y} ${(before.x + x) / 2} ${y} ${x} ${y}`
  }, `M${points[0].x} ${points[0].y}`)
}

// figures: vertex id -> {busy, backpressured, in, out, lag, status}
export function OperatorGraph({ jobId, nodes, figures, narrow }) {
  const found = placed(nodes, narrow ? "TB" : "LR")
  return html`<div class="scroll graph" tabindex="0" role="region" aria-label="Operator graph">
    <svg width=${found.width} height=${found.height} viewBox=${`0 0 ${found.width} ${found.height}`}>
      ${found.edges.map(edge => html`<g class="edge" key=${`${edge.v}${edge.w}`}><path d=${curve(edge, found.at(edge.v), found.at(edge.w), narrow)} />
        <circle cx=${narrow ? found.at(edge.w).x : found.at(edge.w).x - WIDTH / 2} cy=${narrow ? found.at(edge.w).y - HEIGHT / 2 : found.at(edge.w).y} r="4" /></g>`)}
      ${nodes.map(node => html`<${Vertex} key=${node.id} jobId=${jobId} node=${node} figures=${figures[node.id] || {}} place=${found.at(node.id)} />`)}
    </svg></div>`
}

function Vertex({ jobId, node, figures, place }) {
  const [x, y] = [place.x - WIDTH / 2, place.y - HEIGHT / 2]
  const inner = WIDTH - 24
  const busy = Math.max(0, figures.busy ?? 0), held = Math.max(0, figures.backpressured ?? 0)
  const tone = held > 0.5 ? "bad" : held > 0.1 ? "warn" : busy > 0.9 ? "hot" : "calm"
  const name = node.description || node.id
  const lines = [cut(name), `×${node.parallelism} · lag ${duration(figures.lag)}`, `busy ${percent(figures.busy)} · backpressured ${percent(figures.backpressured)}`, `in ${rate(figures.in)} · out ${rate(figures.out)}`]
  return html`<a href=${link("jobs", jobId, "vertices", node.id)} class=${`vertex ${tone}`} transform=${`translate(${x} ${y})`}>
    <rect class="box" width=${WIDTH} height=${HEIGHT} rx="8" />
    <text class="name" x="12" y="22">${lines[0]} </text>
    <text class="small" x="12" y="39">${lines[1]} </text>
    <rect class="track" x="12" y="47" width=${inner} height="6" rx="3" />
    <rect class="busy" x="12" y="47" width=${Math.min(1, busy) * inner} height="6" rx="3" />
    <rect class="held" x=${12 + Math.min(1, busy) * inner} y="47" width=${Math.min(1 - Math.min(1, busy), held) * inner} height="6" rx="3" />
    <text class="small" x="12" y="68">${lines[2]} </text>
    <text class="small" x="12" y="83">${lines[3]} </text>
  </a>`
}
