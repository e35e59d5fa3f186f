// Requests to the server: the API key, errors in one line, and the events of a stream. Addresses are relative to the
// page, so that it also works behind a proxy under a path.

const KEY = "quengine.key";

export class ApiError extends Error {
  /** `fields`: those of the server's error, among them `code`, and of a prompt that is too long both numbers. */
  constructor(
    message: string,
    readonly status = 0,
    readonly fields: Record<string, unknown> = {},
  ) {
    super(message);
  }
}

/** A server that is not reached, or a connection that broke while its answer came. */
export class LostError extends ApiError {}

export const keyKept = (): string => localStorage.getItem(KEY) ?? "";

export function keepKey(key: string): void {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

/** The answer of a route; `body` makes it a POST of JSON. Throws ApiError, or AbortError where `signal` ended it. */
export async function request(
  path: string,
  body?: unknown,
  signal?: AbortSignal,
  more: RequestInit = {},
): Promise<Response> {
  const headers = new Headers(more.headers);
  const key = keyKept();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (body !== undefined) headers.set("Content-Type", "application/json");
  const init: RequestInit = { ...more, headers, cache: "no-store", signal: signal ?? null };
  let response: Response;
  try {
    response = await fetch(
      path,
      body === undefined ? init : { ...init, method: "POST", body: JSON.stringify(body) },
    );
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new LostError("The server cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response: Response): Promise<ApiError> {
  try {
    const { error } = (await response.json()) as { error: { message: string } & Record<string, unknown> };
    return new ApiError(error.message, response.status, error);
  } catch {
    return new ApiError(`HTTP status ${response.status}`, response.status);
  }
}

export interface Event {
  value: unknown;
  /** Bytes of its lines, and of those without a value before it. */
  size: number;
}

const LINE_END = 10;

/**
 * The JSON values of a server-sent event stream, up to [DONE]. Throws ApiError for what is no JSON, LostError where it ends
 * before [DONE].
 */
export async function* events(response: Response): AsyncGenerator<Event> {
  const decoder = new TextDecoder();
  const reader = response.body?.getReader();
  let held = new Uint8Array();
  let size = 0;
  try {
    for (;;) {
      const { value, done } = (await reader?.read()) ?? { done: true };
      if (done || !value) throw new LostError("The connection ended before the answer did.");
      const bytes = new Uint8Array(held.length + value.length);
      bytes.set(held);
      bytes.set(value, held.length);
      let from = 0;
      for (let to = bytes.indexOf(LINE_END); to >= 0; to = bytes.indexOf(LINE_END, from)) {
        const line = decoder.decode(bytes.subarray(from, to));
        size += to + 1 - from;
        from = to + 1;
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield { value: parsed(data), size };
        size = 0;
      }
      held = bytes.slice(from);
    }
  } catch (error) {
    if (error instanceof TypeError) throw new LostError("The connection to the server was lost.");
    throw error;
  } finally {
    reader?.cancel().catch(() => undefined);
  }
}

function parsed(data: string): unknown {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server's stream is broken: an event is not JSON.");
  }
}
