// The tools of the server: which there are, which a chat uses, and their calls. What may change something runs only when
// the person has said so, once or for the rest of the chat.

import { ApiError, request } from "./api";
import type { Chat, Message, ToolCall } from "./chats";
import { changed, keep, notify, speak, state } from "./store";

export interface Tool {
  tool: string;
  display_name: string;
  type: "server" | "mcp";
  permissions: { write: boolean };
  definition: { type: "function"; function: { name: string; description: string } };
}

export type Decision = "once" | "always" | "never";

const MAX_RESULT = 100_000;
const decisions = new Map<ToolCall, (decision: Decision) => void>();

/** Look which tools the server has; one without any says so with 403. */
export async function findTools(): Promise<void> {
  try {
    state.tools = (await (await request("tools")).json()) as Tool[];
  } catch (error) {
    if (error instanceof ApiError && error.status === 403) state.tools = [];
  }
  changed();
}

/** The tools that a chat uses, of those that there are. */
export const toolsOf = (chat: Chat): Tool[] =>
  state.tools.filter(({ tool }) => chat.settings.tools?.includes(tool));

/** The calls of a message that have no result yet. */
export const pendingCalls = (message: Message): ToolCall[] =>
  (message.calls ?? []).filter(call => call.result === undefined);

/** Whether a call waits for the person's decision. */
export const isAsked = (call: ToolCall): boolean => decisions.has(call);

export const decide = (call: ToolCall, decision: Decision): void => decisions.get(call)?.(decision);

/** Make the calls of a message, one after another. Throws AbortError where `signal` ended it. */
export async function makeCalls(chat: Chat, message: Message, signal: AbortSignal): Promise<void> {
  for (const call of pendingCalls(message)) {
    const result = await outcome(chat, call, signal);
    call.failed = result.failed;
    call.result = result.text.slice(0, MAX_RESULT);
    keep(chat);
  }
}

interface Outcome {
  text: string;
  failed: boolean;
}

async function outcome(chat: Chat, call: ToolCall, signal: AbortSignal): Promise<Outcome> {
  const tool = toolsOf(chat).find(each => each.tool === call.name);
  if (!tool) return problem(`There is no tool ${call.name} in this chat.`);
  let params: unknown;
  try {
    params = JSON.parse(call.arguments || "{}");
  } catch (error) {
    return problem(`The arguments are not JSON: ${(error as Error).message}`);
  }
  if (tool.permissions.write && !chat.allowed?.includes(tool.tool)) {
    const decision = await asked(chat, call, tool, signal);
    if (decision === "never") return problem("The person did not allow this call.");
    if (decision === "always") chat.allowed = [...(chat.allowed ?? []), tool.tool];
  }
  try {
    const response = await request("tools", { tool: tool.tool, params }, signal);
    const answer = (await response.json()) as { plain_text_response?: string; error?: string };
    const text = answer.plain_text_response ?? JSON.stringify(answer);
    return { text, failed: answer.error !== undefined };
  } catch (error) {
    if (signal.aborted) throw error;
    return problem((error as Error).message);
  }
}

const problem = (error: string): Outcome => ({ text: JSON.stringify({ error }), failed: true });

async function asked(chat: Chat, call: ToolCall, tool: Tool, signal: AbortSignal): Promise<Decision> {
  try {
    return await new Promise((resolve, reject) => {
      decisions.set(call, resolve);
      signal.addEventListener("abort", () => reject(signal.reason as Error), { once: true });
      if (signal.aborted) reject(signal.reason as Error);
      speak(`May the model use ${tool.display_name}?`);
      if (chat !== state.chat) notify(`${chat.title}: a tool waits until you allow it`);
    });
  } finally {
    decisions.delete(call);
    changed();
  }
}
