// Answers under way: the request of a chat's messages, its stream into the message that it fills, and its end. Several
// chats may be answered at once, shown or not.

import { ApiError, events, request } from "./api";
import { withAttachments } from "./attachments";
import {
  type Attachment,
  type Chat,
  type Costs,
  type Message,
  type Token,
  type ToolCall,
  addMessage,
  pathTo,
} from "./chats";
import { fieldsOf } from "./options";
import { makeCalls, pendingCalls, toolsOf } from "./tools";
import { answering, followLoading, keep, modelOf, notify, show, speak, state, statusOf } from "./store";

interface Run {
  chat: Chat;
  message: Message;
  control: AbortController;
  /** How much of the prompt is computed, 0 to 1. */
  progress: number;
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
const runs = new Map<string, Run>();
let leaving = false;
addEventListener("pagehide", () => (leaving = true));
addEventListener("pageshow", () => (leaving = false));

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

/** An answer, and those that follow from the results of its calls. */
async function fillAll(chat: Chat, first: Message): Promise<void> {
  let message = first;
  for (let round = 0; round < MAX_ROUNDS; round++) {
    await fill(chat, message);
    const goesOn = message.calls?.length && !pendingCalls(message).length && !message.state && !message.error;
    if (!goesOn || leaving || !(message.id in chat.messages) || !state.chats.includes(chat)) return;
    message = addAnswer(chat, message.id);
  }
  notify(`Stopped after ${MAX_ROUNDS} rounds of calls`);
}

async function fill(chat: Chat, message: Message): Promise<void> {
  const run: Run = { chat, message, control: new AbortController(), progress: 0 };
  runs.set(message.id, run);
  answering.set(chat.id, message);
  message.state = "running";
  delete message.error;
  keep(chat);
  speak("Answering");
  if ((statusOf(message.model ?? "") ?? "loaded") !== "loaded") void followLoading();
  let ending: Message["state"];
  try {
    if (!message.calls?.length) await stream(chat, message, run);
    await makeCalls(chat, message, run.control.signal);
    speak("The answer is complete");
  } catch (error) {
    if (leaving) return; // the browser ended the stream: kept as running, which the next visit shows as interrupted
    ending = run.control.signal.aborted ? "stopped" : "interrupted";
    if (ending === "interrupted") failed(message, error);
  }
  runs.delete(message.id);
  answering.delete(chat.id);
  if (ending && (message.content || message.thought || message.error || message.calls)) message.state = ending;
  else delete message.state;
  if (message.id in chat.messages) settle(chat, message);
}

function failed(message: Message, error: unknown): void {
  message.error = (error as Error).message;
  speak(`Error: ${message.error}`);
  if (error instanceof ApiError && error.status === 401) show("key");
}

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

async function stream(chat: Chat, message: Message, run: Run): Promise<void> {
  const response = await request("v1/chat/completions", bodyOf(chat, message), run.control.signal);
  let end = "";
  let thinkingSince = 0;
  const begun = { length: message.content.length, tokens: message.costs?.tokens ?? 0 };
  const scored = !begun.length || message.tokens !== undefined; // else those before are missing
  for await (const event of events(response)) {
    if (!(message.id in chat.messages) || !state.chats.includes(chat)) return run.control.abort(); // deleted meanwhile
    const chunk = event as Chunk;
    if (chunk.error) throw new ApiError(chunk.error.message);
    const choice = chunk.choices?.[0];
    const { content, reasoning_content: thought } = choice?.delta ?? {};
    if (thought) {
      thinkingSince ||= performance.now();
      message.thought = (message.thought ?? "") + thought;
      message.thoughtSeconds = (performance.now() - thinkingSince) / 1000;
    }
    message.content += content ?? "";
    if (scored)
      for (const token of choice?.logprobs?.content ?? []) (message.tokens ??= []).push(tokenOf(token));
    for (const part of choice?.delta?.tool_calls ?? []) addPart((message.calls ??= []), part);
    if (chunk.prompt_progress)
      run.progress = chunk.prompt_progress.processed / Math.max(1, chunk.prompt_progress.total);
    end = choice?.finish_reason ?? end;
    const added = chunk.usage?.completion_tokens;
    if (added || (chunk.usage && !message.costs)) message.costs = costsOf(chunk, end, begun.tokens);
    keep(chat, true);
  }
  if (!end) throw new ApiError("The connection ended before the answer did.");
  if (begun.length && begun.length === message.content.length) notify("The model adds nothing to this answer");
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
});
