// Lines over time, by uPlot, in the page's own colours.

import { useEffect, useRef } from "./vendor/preact/hooks.mjs"
import { html } from "./parts.js"
import { clock, newest } from "./format.js"

const HEIGHT = 150
const scheme = matchMedia("(prefers-color-scheme: dark)")

// lines: [{label, values}] over `timesMs`; `format` of a value. What the newest point says stands in the label, for who can't see it.
export function Lines({ title, timesMs, lines, format, ceiling = null }) {
  const place = useRef(null)
  const plot = useRef(null)
  const shape = lines.map(line => line.label).join("\n")
  const data = [timesMs.map(time => time / 1000), ...lines.map(line => line.values)]
  useEffect(() => {
    const element = place.current
    const make = () => {
      plot.current?.destroy()
      plot.current = new window.uPlot(options(element, lines, format, ceiling), data, element)
    }
    make()
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }))
    resized.observe(element)
    scheme.addEventListener("change", make)
    return () => { resized.disconnect(); scheme.removeEventListener("change", make); plot.current.destroy(); plot.current = null }
  }, [shape])
  useEffect(() => { plot.current?.setData(data) }, [timesMs, lines])
  const said = lines.map(line => `${line.label} ${format(newest(line.values))}`).join(", ")
  return html`<figure class="chart"><figcaption>${title}</figcaption>
    <div ref=${place} role="img" aria-label=${`${title}, newest: ${said || "nothing yet"}`} />
    <ul class="legend">${lines.map((line, index) => html`<li><span class=${`line l${index % 6}`} aria-hidden="true" /> ${line.label} <b>${format(newest(line.values))}</b></li>`)}</ul></figure>`
}

function options(element, lines, format, ceiling) {
  const style = getComputedStyle(element)
  const colour = name => style.getPropertyValue(name).trim()
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" }
  return {
    width: Math.max(200, element.clientWidth), height: HEIGHT, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, ceiling ?? Math.max(1, high * 1.1)] } },
    axes: [{ ...axis, space: 70, size: 26, values: (_, ticks) => ticks.map(tick => clock(tick * 1000).slice(0, ticks.length > 1 && ticks[1] - ticks[0] < 60 ? 8 : 5)) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(format) }],
    series: [{}, ...lines.map((line, index) => ({ label: line.label, stroke: colour(`--line-${index % 6}`), width: 2, spanGaps: false, points: { show: false } }))],
  }
}
