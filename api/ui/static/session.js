// Requests to the service, and who is logged in.
//
// The token is exchanged for a cookie that no script can read; this page keeps no token.

const ROOT = new URL("../", document.baseURI)

export class ApiError extends Error {
  constructor(status, messages, kind, retryAfterS = null) {
    super(messages.join("; ") || `HTTP ${status}`)
    Object.assign(this, { status, kind, retryAfterS })
  }
}

async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" }
  let response
  try {
    response = await fetch(new URL(path, ROOT), {
      method, headers, signal, credentials: "same-origin", redirect: "error",
      body: body === undefined ? undefined : JSON.stringify(body),
    })
  } catch (error) {
    if (error.name === "AbortError") throw error
    throw new ApiError(0, ["the service does not answer"], "Unreachable")
  }
  if (response.ok) return response
  if (response.status === 401 && !path.startsWith("ui/")) dispatchEvent(new Event("holdfast:logged-out"))
  let messages = []
  try { messages = (await response.json()).errors || [] } catch { /* no JSON: the status says it */ }
  throw new ApiError(response.status, messages, response.headers.get("X-Holdfast-Error") || "", Number(response.headers.get("Retry-After")) || null)
}

// Answer of a GET: its JSON, until when it is known to have been so, and when the service said so, both by the service's clock.
export async function get(path, signal) {
  const response = await ask(path, { signal })
  const data = await response.json()
  const header = Number(response.headers.get("X-Holdfast-As-Of"))
  const asOfMs = header > 0 ? header : data && data.as_of_ms > 0 ? data.as_of_ms : null
  return { data, asOfMs, serviceMs: Date.parse(response.headers.get("Date") || "") || null }
}

// Answers of several such GETs in one request: of paths that the service answers from what jobs publish.
export async function getTogether(paths, signal) {
  const { data, asOfMs, serviceMs } = await get(`v1/views?${paths.map(each => `path=${encodeURIComponent(`/${each}`)}`).join("&")}`, signal)
  const failed = data.answers.find(each => each.status !== 200)
  if (failed) throw new ApiError(failed.status, failed.body.errors || [], failed.error)
  return data.answers.map(each => ({ data: each.body, asOfMs, serviceMs }))
}

export async function send(method, path, body) {
  const response = await ask(path, { method, body })
  const text = await response.text()
  return text ? JSON.parse(text) : {}
}

// Begin something that takes a while, and wait for its outcome; returns its operation. Raises ApiError with the cause.
export async function operate(path, body, statusPath) {
  const { "request-id": id } = await send("POST", path, body)
  for (;;) {
    const { data } = await get(`${statusPath}/${id}`)
    if (data.status.id !== "IN_PROGRESS") {
      const cause = data.operation && data.operation["failure-cause"]
      if (cause) throw new ApiError(500, [cause["stack-trace"].split("\n")[0]], cause.class)
      return data.operation || {}
    }
    await new Promise(resolve => setTimeout(resolve, 500))
  }
}

// Who this page is, or null if it has to log in.
export const currentSession = async () => (await get("ui/visitor")).data.session

export const logIn = token => send("POST", "ui/login", { token })
export const logOut = () => send("POST", "ui/logout")
