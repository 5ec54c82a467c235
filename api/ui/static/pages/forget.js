// Forgetting a key of a job: asked for here, by typing the job's name, done by the service, told by its certificate.

import { useEffect, useState } from "../vendor/preact/hooks.mjs"
import { html, Card, Shown, Status, Table } from "../parts.js"
import { count, moment, plural } from "../format.js"
import { usePoll } from "../polling.js"
import { send } from "../session.js"
import { Action } from "../dialog.js"

const OUTCOMES = { running: "running", complete: "completed", incomplete: "incomplete", error: "failed" }

const rowsErased = certificate => Object.values(certificate.erased_rows).reduce((sum, rows) => sum + rows, 0)

// The certificate as a file: its address is of this page's own memory, and is given back when another one takes its place.
function Download({ certificate, id }) {
  const [address, setAddress] = useState(null)
  const text = JSON.stringify(certificate, null, 2)
  useEffect(() => {
    const made = URL.createObjectURL(new Blob([`${text}\n`], { type: "application/json" }))
    setAddress(made)
    return () => URL.revokeObjectURL(made)
  }, [text])
  return html`<a href=${address} download=${`forgotten-${id}.json`}>Download</a>`
}

const places = found => html`<ul>${Object.entries(found).map(([place, why]) => html`<li><b>${place}</b>: ${String(why)}</li>`)}</ul>`

function Certificate({ certificate }) {
  return html`<details><summary>Certificate</summary>
    ${certificate.erased_at
      ? html`<p>It left the running job at the barrier of checkpoint ${certificate.erased_at}, read back at <code>${certificate.result}</code>, which retention deletes as newer ones complete. A restore is from the newest.</p>`
      : certificate.result ? html`<p>Restore from <code>${certificate.result}</code></p>` : null}
    <p>${count(rowsErased(certificate))} rows were erased, ${plural(certificate.deleted.length, "snapshot")} deleted; ${count(Object.values(certificate.verified).reduce((sum, rows) => sum + rows, 0))} rows were read again.</p>
    ${Object.keys(certificate.kept).length ? html`<p>Kept:</p>${places(certificate.kept)}` : null}
    ${certificate.remaining.length ? html`<p>Other states that hold the key:</p><ul>${certificate.remaining.map(each => html`<li>${each}</li>`)}</ul>` : null}
    <p>Not covered:</p>${places(certificate.not_covered)}</details>`
}

export function Forget({ job, name }) {
  const poll = usePoll(`v1/jobs/${job}/forget`, 2_000)
  const act = async values => {
    const body = { states: [{ operator: values.operator.trim(), state: values.state.trim() }], key: values.key, to: values.to.trim() }
    const found = await send("POST", `v1/jobs/${job}/forget`, body)
    poll.refresh()
    return found
  }
  return html`<${Card} title="Forget a key" aside=${html`<span class="quiet">A savepoint without it takes the place of the newest snapshot; all others that may hold it are deleted.</span>`}>
    <${Shown} poll=${poll}>${({ forgettings }) => html`<${Table} caption="Forgettings" rows=${forgettings} rowKey=${each => each.forget_id} empty="None since this coordinator began." columns=${[
      ["Asked for", each => moment(each.started_ms), "time"],
      ["Outcome", each => html`<${Status} of=${OUTCOMES[each.state] || each.state} />${each.error ? html` ${each.error} <small>${each.error_kind}</small>` : null}`],
      ["What was done", each => each.certificate ? html`<${Certificate} certificate=${each.certificate} />` : null],
      ["", each => each.certificate ? html`<${Download} certificate=${each.certificate} id=${each.forget_id} />` : null],
    ]} />`}<//>
    <p class="buttons"><${Action} label="Forget a key" kind="danger" title=${`Forget a key of ${name}?`} typed=${name} act=${act}
      done=${() => html`<p>It runs. Its certificate is shown when it has ended.</p>`} fields=${[
        { name: "operator", label: "Operator", value: "", help: "Its uid." },
        { name: "state", label: "State", value: "*", help: "*: all keyed states and timers of the operator." },
        { name: "key", label: "Key", value: "", help: "As behind holdfast forget --key. It is in no log." },
        { name: "to", label: "Directory for the savepoint without the key", value: "", help: "Beside the state directory." },
      ]}><p>It can't be undone: snapshots with the key are deleted, and so are the job's history and its drills.</p><//></p><//>`
}
