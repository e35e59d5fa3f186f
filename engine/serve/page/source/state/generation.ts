// Answers under way: the request of a chat's messages, its stream into the message that it fills, and its end. Several
// chats may be answered at once, shown or not. The server goes on with a stream whose connection ends, so that it is read
// on after a reload, or a connection that broke.

import { ApiError, LostError, events, request } from "./api";
import { withAttachments } from "./attachments";
import {
  type Attachment,
  type Chat,
  type Costs,
  type Message,
  type Token,
  type ToolCall,
  addBranch,
  addMessage,
  newChat,
  newestTurns,
  pathTo,
  randomId,
} from "./chats";
import { fieldsOf } from "./options";
import { alone, isLeaving, mayTakeOver } from "./ownership";
import {
  answering,
  changed,
  describe,
  followLoading,
  keep,
  modelOf,
  notify,
  openChat,
  show,
  speak,
  state,
  statusOf,
} from "./store";
import { makeCalls, pendingCalls, toolsOf } from "./tools";

interface Run {
  chat: Chat;
  message: Message;
  control: AbortController;
  /** How much of the prompt is computed, 0 to 1. */
  progress: number;
  /** Tokens in the context so far; 0 where that is not known. */
  context: number;
  /** Why the server does not take the request yet. */
  waiting: string;
}

interface Scored {
  token: string;
  logprob: number;
}

interface CallPart {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

interface Chunk {
  error?: { message: string };
  choices?: {
    delta?: { content?: string | null; reasoning_content?: string | null; tool_calls?: CallPart[] | null };
    finish_reason?: string | null;
    logprobs?: { content?: (Scored & { top_logprobs?: Scored[] })[] | null } | null;
  }[];
  prompt_progress?: { total: number; processed: number };
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  timings?: { predicted_per_second: number; prompt_ms: number; cache_n: number };
  seed?: number | null;
}

/** Answers with calls that may follow one another before the person writes again. */
const MAX_ROUNDS = 50;
const RETRY_MS = 1000;
/** How long a request that may not have reached the server is sent again after a reload. */
const FRESH_MS = 300_000;
/** Codes of a 503 that do not pass by themselves. */
const FINAL_CODES: unknown[] = ["draining", "stopped", "unloaded"];
const runs = new Map<string, Run>();

/** The server does not have the rest of an answer that a reload cut. */
class GoneError extends Error {}

export const runOf = (message: Message): Run | undefined => runs.get(message.id);

/** The answer under way of a chat. */
export function runningIn(chat: Chat): Message | undefined {
  for (const run of runs.values()) if (run.chat === chat) return run.message;
  return undefined;
}

export function stop(chat: Chat): void {
  const message = runningIn(chat);
  if (message) runs.get(message.id)?.control.abort();
}

/** Add a person's message after `parent` and have it answered. */
export function send(chat: Chat, parent: string | null, content: string, attachments: Attachment[]): void {
  if (runningIn(chat)) return;
  if (!chat.named && !chat.leaf)
    chat.title = (content || attachments[0]?.name || "New chat").replace(/\s+/g, " ").slice(0, 80);
  const message = addMessage(
    chat,
    parent,
    attachments.length ? { role: "user", content, attachments } : { role: "user", content },
  );
  void answer(chat, message.id);
}

/** Another answer to what came before `message`, beside it. */
export function regenerate(chat: Chat, message: Message): void {
  if (runningIn(chat)) return;
  if (message.stream) return void resume(chat, message); // the rest of it may be there
  if (message.error && !message.content) delete chat.messages[message.id];
  void answer(chat, message.role === "user" ? message.id : message.parent);
}

async function answer(chat: Chat, parent: string | null): Promise<void> {
  await fillAll(chat, addAnswer(chat, parent));
}

const addAnswer = (chat: Chat, parent: string | null): Message =>
  addMessage(chat, parent, { role: "assistant", content: "", model: modelOf(chat) });

/** Go on with an answer from where it ended, or with its calls. */
export async function resume(chat: Chat, message: Message): Promise<void> {
  if (!runningIn(chat)) await fillAll(chat, message);
}

/** What `newestTurns` leaves of the messages that `answer` could not be given to. */
export const turnsThatFit = (chat: Chat, answer: Message): Message[] =>
  answer.overflow
    ? newestTurns(pathTo(chat, answer.parent), answer.overflow, chat.settings.system?.length ?? 0)
    : [];

/** Answer without the oldest turns: those that fit are a branch beside the others. */
export function answerNewest(chat: Chat, refused: Message): void {
  const turns = turnsThatFit(chat, refused);
  if (runningIn(chat) || !turns.length) return;
  delete chat.messages[refused.id];
  void answer(chat, addBranch(chat, turns));
}

/** Ask the last message of a chat in a new one with the same settings. */
export function askAnew(chat: Chat, refused: Message): void {
  const asked = chat.messages[refused.parent ?? ""];
  if (!asked) return;
  const next = newChat(chat.settings, chat.model);
  openChat(next);
  send(next, null, asked.content, asked.attachments ?? []);
}

/** Go on with the answers that a reload cut, or a tab that has been closed. */
export function resumeAnswers(): void {
  for (const chat of state.chats)
    for (const message of Object.values(chat.messages))
      if (message.state === "running") {
        if (mayTakeOver(message.id)) void takeOver(chat.id, message.id);
        else message.state = "interrupted";
      }
}

async function takeOver(chatId: string, id: string): Promise<void> {
  let chat: Chat | undefined;
  let message: Message | undefined;
  await alone(id, async () => {
    chat = state.chats.find(each => each.id === chatId); // as the tab that had it has written it meanwhile
    message = chat?.messages[id];
    if (!chat || message?.state !== "running" || runningIn(chat)) message = undefined;
    else if (message.stream) await fill(chat, message, true);
    else {
      message.state = "interrupted";
      keep(chat);
    }
  });
  if (chat && message) await goOn(chat, message);
}

/** An answer, and those that follow from the results of its calls. */
async function fillAll(chat: Chat, message: Message): Promise<void> {
  await alone(message.id, () => fill(chat, message));
  await goOn(chat, message);
}

async function goOn(chat: Chat, first: Message): Promise<void> {
  let message = first;
  for (let round = 1; round < MAX_ROUNDS; round++) {
    const goesOn = message.calls?.length && !pendingCalls(message).length && !message.state && !message.error;
    if (!goesOn || isLeaving() || !(message.id in chat.messages) || !state.chats.includes(chat)) return;
    const next = (message = addAnswer(chat, message.id));
    await alone(next.id, () => fill(chat, next));
  }
  notify(`Stopped after ${MAX_ROUNDS} rounds of calls`);
}

/** `found`: its stream began before this page did. */
async function fill(chat: Chat, message: Message, found = false): Promise<void> {
  const run: Run = { chat, message, control: new AbortController(), progress: 0, context: 0, waiting: "" };
  runs.set(message.id, run);
  answering.set(chat.id, message);
  const streams = message.stream !== undefined || !message.calls?.length;
  const begun = message.stream !== undefined;
  if (streams) message.stream ??= { id: randomId(), at: 0, end: "" };
  message.state = "running";
  delete message.error;
  delete message.overflow;
  keep(chat);
  speak("Answering");
  if ((statusOf(message.model ?? "") ?? "loaded") !== "loaded") void followLoading();
  let ending: Message["state"];
  let lost = false;
  try {
    if (message.stream) await stream(run, message.stream, begun, found);
    await makeCalls(chat, message, run.control.signal);
    speak("The answer is complete");
  } catch (error) {
    if (isLeaving()) return; // the browser ended the stream: kept as running, and the next visit goes on with it
    ending = run.control.signal.aborted ? "stopped" : "interrupted";
    if (ending === "interrupted" && !(error instanceof GoneError)) failed(message, error);
    lost = error instanceof LostError;
  }
  if (message.stream && !(lost && message.stream.at)) endStream(message);
  runs.delete(message.id);
  answering.delete(chat.id);
  if (ending && (message.content || message.thought || message.error || message.calls)) message.state = ending;
  else delete message.state;
  if (message.id in chat.messages) settle(chat, message);
}

function failed(message: Message, error: unknown): void {
  message.error = (error as Error).message;
  speak(`Error: ${message.error}`);
  if (!(error instanceof ApiError)) return;
  if (error.status === 401) show("key");
  const { code, n_prompt_tokens: tokens, n_ctx: context } = error.fields;
  if (code === "context_length_exceeded" && typeof tokens === "number" && typeof context === "number")
    message.overflow = { tokens, context };
}

/** End what the server computes for a message that is stopped, deleted or failed. */
function endStream(message: Message): void {
  const address = streamAddress(message.stream?.id ?? "");
  delete message.stream;
  request(address, undefined, undefined, { method: "DELETE", keepalive: true }).catch(() => undefined);
}

const streamAddress = (id: string): string => `v1/stream?conv_id=${encodeURIComponent(id)}`;

/** An answer that was stopped before it began leaves nothing behind. */
function settle(chat: Chat, message: Message): void {
  const empty = !(message.content || message.thought || message.error || message.costs || message.calls);
  if (empty) {
    delete chat.messages[message.id];
    if (chat.leaf === message.id) chat.leaf = message.parent;
  }
  chat.updated = Date.now();
  if (!state.chats.includes(chat)) return;
  keep(chat);
  if (chat !== state.chat && !message.calls) notify(`${message.error ? "No answer" : "Answered"}: ${chat.title}`);
}

function bodyOf(chat: Chat, message: Message): unknown {
  const given = pathTo(chat, message.parent).flatMap(partsOf);
  const system = chat.settings.system?.trim();
  if (system) given.unshift({ role: "system", content: system });
  const tools = toolsOf(chat).map(each => each.definition);
  const begun = {
    role: "assistant",
    content: message.content,
    ...(message.thought && { reasoning_content: message.thought }),
  };
  return {
    model: modelOf(chat) || undefined,
    messages: message.content || message.thought ? [...given, begun] : given,
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    ...(tools.length && { tools }),
    ...fieldsOf(chat.settings),
  };
}

type Part = Record<string, unknown>;

/** A message as the server takes it, and the results of its calls behind it. */
function partsOf({ role, content, attachments, calls }: Message): Part[] {
  const text = withAttachments(content, attachments);
  if (!calls?.length) return [{ role, content: text }];
  const made = calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  const results = calls.map(({ id, result }) => ({
    role: "tool",
    tool_call_id: id,
    content: result ?? "The call was not made.",
  }));
  return [{ role, content: text, tool_calls: made }, ...results];
}

/** Fill a message with its stream; `begun`: an earlier request has begun it. Throws GoneError where `found` is not there. */
async function stream(run: Run, at: Stream, begun: boolean, found: boolean): Promise<void> {
  const { chat, message } = run;
  const length = message.content.length;
  let response = begun ? await rest(run, at) : undefined;
  if (found && !response && (hasBegun(message) || Date.now() - message.time > FRESH_MS)) throw new GoneError();
  if (!response) {
    at = message.stream = { id: at.id, at: 0, end: "" };
    const headers = { "X-Conversation-Id": at.id };
    response = await whenReady(run, () =>
      request("v1/chat/completions", bodyOf(chat, message), run.control.signal, { headers }),
    );
  }
  for (;;) {
    const before = at.at;
    try {
      await read(response, run, at);
      break;
    } catch (error) {
      if (!(error instanceof LostError)) throw error;
      const next = at.at > before ? await rest(run, at) : undefined;
      if (!next) delete message.stream;
      if (!next && !at.end) throw error;
      if (!next) break;
      response = next;
    }
  }
  if (run.control.signal.aborted) return;
  delete message.stream;
  if (!at.end) throw new ApiError("The connection ended before the answer did.");
  if (length && length === message.content.length && !found) notify("The model adds nothing to this answer");
}

const hasBegun = (message: Message): boolean => Boolean(message.content || message.thought || message.calls?.length);

/** The rest of a stream; undefined where the server does not have it. */
async function rest(run: Run, { id, at }: Stream): Promise<Response | undefined> {
  try {
    const address = `${streamAddress(id)}&from=${at}`;
    return await whenReady(run, () => request(address, undefined, run.control.signal));
  } catch (error) {
    if (error instanceof ApiError && [400, 404].includes(error.status)) return undefined;
    throw error;
  }
}

/** What a request gives, once the server is ready for it: a model is loaded, an engine replaced. */
async function whenReady(run: Run, ask: () => Promise<Response>): Promise<Response> {
  for (;;) {
    try {
      const response = await ask();
      run.waiting = "";
      return response;
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 503 || FINAL_CODES.includes(error.fields.code)) throw error;
      if (!run.waiting) speak(`${error.message}; the message is sent when the server is ready`);
      run.waiting = error.message;
      changed();
    }
    await untilHealthy(run.control.signal);
    void describe();
  }
}

/** Wait until the server says that it is well; at least a moment. */
async function untilHealthy(signal: AbortSignal): Promise<void> {
  for (;;) {
    await pause(signal);
    try {
      await request("health", undefined, signal);
      return;
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 503 || FINAL_CODES.includes(error.fields.code)) throw error;
    }
  }
}

function pause(signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stopped = (): void => reject(signal.reason as Error);
    signal.addEventListener("abort", stopped, { once: true });
    setTimeout(() => {
      signal.removeEventListener("abort", stopped);
      resolve();
    }, RETRY_MS);
    if (signal.aborted) stopped();
  });
}

type Stream = NonNullable<Message["stream"]>;

/** The events of a stream into the message, each with the place behind it. */
async function read(response: Response, run: Run, at: Stream): Promise<void> {
  const { chat, message } = run;
  const before = message.costs?.tokens ?? 0;
  const scored = !message.content.length || message.tokens !== undefined; // else those before are missing
  let thinkingSince = performance.now() - 1000 * (message.thoughtSeconds ?? 0);
  for await (const { value, size } of events(response)) {
    if (!(message.id in chat.messages) || !state.chats.includes(chat)) return run.control.abort(); // deleted meanwhile
    const chunk = value as Chunk;
    if (chunk.error) throw new ApiError(chunk.error.message, 0, { ...chunk.error });
    at.at += size;
    const choice = chunk.choices?.[0];
    const { content, reasoning_content: thought } = choice?.delta ?? {};
    if (thought) {
      if (message.thought === undefined) thinkingSince = performance.now();
      message.thought = (message.thought ?? "") + thought;
      message.thoughtSeconds = (performance.now() - thinkingSince) / 1000;
    }
    message.content += content ?? "";
    if (scored)
      for (const token of choice?.logprobs?.content ?? []) (message.tokens ??= []).push(tokenOf(token));
    for (const part of choice?.delta?.tool_calls ?? []) addPart((message.calls ??= []), part);
    if (content || thought) run.context += run.context ? 1 : 0;
    if (chunk.prompt_progress) {
      run.progress = chunk.prompt_progress.processed / Math.max(1, chunk.prompt_progress.total);
      run.context = chunk.prompt_progress.total;
    }
    at.end = choice?.finish_reason ?? at.end;
    const added = chunk.usage?.completion_tokens;
    if (added || (chunk.usage && !message.costs)) message.costs = costsOf(chunk, at.end, before);
    keep(chat, true);
  }
}

/** A call comes in parts: its name, then its arguments bit by bit. */
function addPart(calls: ToolCall[], { index, id, function: part }: CallPart): void {
  const call = (calls[index] ??= { id: id ?? `call_${index}`, name: "", arguments: "" });
  call.name += part?.name ?? "";
  call.arguments += part?.arguments ?? "";
}

const tokenOf = (scored: Scored & { top_logprobs?: Scored[] }): Token => ({
  text: scored.token,
  logprob: scored.logprob,
  top: (scored.top_logprobs ?? []).map(({ token, logprob }) => ({ text: token, logprob })),
});

/** `before`: tokens of the answer that is continued. */
const costsOf = (chunk: Chunk, end: string, before: number): Costs => ({
  tokens: before + (chunk.usage?.completion_tokens ?? 0),
  perSecond: chunk.timings?.predicted_per_second ?? 0,
  prompt: chunk.usage?.prompt_tokens ?? 0,
  cached: chunk.timings?.cache_n ?? 0,
  promptSeconds: (chunk.timings?.prompt_ms ?? 0) / 1000,
  end,
  seed: chunk.seed ?? null,
  context: (chunk.usage?.prompt_tokens ?? 0) + (chunk.usage?.completion_tokens ?? 0),
});
