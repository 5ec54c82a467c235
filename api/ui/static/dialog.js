// Questions before something is changed: the browser's own dialog, which keeps the keyboard inside and closes by Escape.

import { useEffect, useRef, useState } from "./vendor/preact/hooks.mjs"
import { html, Problem } from "./parts.js"

// `act(fields)` does it; its result is shown by `done`. `typed`: what has to be typed before it may be done.
// fields: [{name, label, value, help?, kind?: "checkbox"}].
export function Action({ label, title, children, act, done, typed = null, fields = [], kind = "" }) {
  const dialog = useRef(null)
  const [open, setOpen] = useState(false)
  const [state, setState] = useState({ busy: false, error: null, result: null })
  const [confirmed, setConfirmed] = useState("")
  const [values, setValues] = useState({})
  const id = useRef(`d${Math.random().toString(36).slice(2)}`).current
  useEffect(() => { if (open && dialog.current && !dialog.current.open) dialog.current.showModal() }, [open])
  const begin = () => {
    setState({ busy: false, error: null, result: null })
    setConfirmed("")
    setValues(Object.fromEntries(fields.map(field => [field.name, field.value ?? ""])))
    setOpen(true)
  }
  const submit = async event => {
    event.preventDefault()
    if (typed !== null && confirmed !== typed) return
    setState({ busy: true, error: null, result: null })
    try {
      setState({ busy: false, error: null, result: await act(values) ?? true })
    } catch (error) {
      setState({ busy: false, error, result: null })
    }
  }
  const close = () => dialog.current.close()
  return html`<button type="button" class=${kind} onClick=${begin}>${label}</button>
    ${open ? html`<dialog ref=${dialog} aria-labelledby=${`${id}t`} onClose=${() => setOpen(false)}>
      <form onSubmit=${submit}>
        <h2 id=${`${id}t`}>${title}</h2>
        ${state.result === null ? html`
          ${children}
          ${fields.map(field => field.kind === "checkbox"
            ? html`<label class="check"><input type="checkbox" checked=${values[field.name]} onChange=${event => setValues({ ...values, [field.name]: event.target.checked })} /> ${field.label}</label>`
            : html`<label>${field.label}<input value=${values[field.name]} onInput=${event => setValues({ ...values, [field.name]: event.target.value })} spellcheck="false" autocomplete="off" />${field.help ? html`<small>${field.help}</small>` : null}</label>`)}
          ${typed !== null ? html`<label>Type <code>${typed}</code> to confirm<input name="confirm" value=${confirmed} onInput=${event => setConfirmed(event.target.value)} autocomplete="off" spellcheck="false" /></label>` : null}
          <${Problem} error=${state.error} />
          <p class="buttons"><button type="button" onClick=${close}>Leave it</button>
          <button type="submit" class=${`main ${kind}`} disabled=${state.busy || (typed !== null && confirmed !== typed)}>${state.busy ? "Working …" : label}</button></p>`
        : html`<div role="status">${done ? done(state.result) : html`<p>Done.</p>`}</div><p class="buttons"><button type="button" class="main" onClick=${close} autofocus>Close</button></p>`}
      </form></dialog>` : null}`
}
