// Requests to the server: the API key, errors in one line, and the events of a stream. Addresses are relative to the
// page, so that it also works behind a proxy under a path.

const KEY = "quengine.key";

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status = 0,
  ) {
    super(message);
  }
}

export const keyKept = (): string => localStorage.getItem(KEY) ?? "";

export function keepKey(key: string): void {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

/** The answer of a route; `body` makes it a POST of JSON. Throws ApiError, or AbortError where `signal` ended it. */
export async function request(path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = {};
  const key = keyKept();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const init: RequestInit = { headers, cache: "no-store", signal: signal ?? null };
  let response: Response;
  try {
    response = await fetch(
      path,
      body === undefined ? init : { ...init, method: "POST", body: JSON.stringify(body) },
    );
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw new ApiError(await messageOf(response), response.status);
  return response;
}

async function messageOf(response: Response): Promise<string> {
  try {
    const { error } = (await response.json()) as { error: { message: string } };
    return error.message;
  } catch {
    return `HTTP status ${response.status}`;
  }
}

/** The JSON values of a server-sent event stream, up to [DONE]. Throws ApiError for what is no JSON. */
export async function* events(response: Response): AsyncGenerator<unknown> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop() ?? "";
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield parsed(data);
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError("The connection to the server was lost.");
    throw error;
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function parsed(data: string): unknown {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server's stream is broken: an event is not JSON.");
  }
}
