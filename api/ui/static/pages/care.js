// What keeps snapshots fit for use: labels, drills, and what they cost. A service may lack each of them.

import { html, Card, Fresh, noSuch, Shown } from "../parts.js"
import { usePoll } from "../polling.js"

export function Labels({ job }) {
  const poll = usePoll(`v1/jobs/${job}/labels`, 10_000)
  return html`<${Card} title="Labels"><${Shown} poll=${poll} missing=${noSuch("labels")}>${() => null}<//><//>`
}

export function Care({ job }) {
  const drills = usePoll(`v1/jobs/${job}/drills`, 10_000)
  return html`<div class="title"><h1 tabindex="-1">Drills and cost</h1><${Fresh} poll=${drills} /></div>`
}
