// What the page shows, and how it changes: all chats, the open one, the server's models, and short notices. Views call
// `useStore` and are drawn again after `changed`. An answer that grows draws its own message only, which calls
// `useGrowth`, at most once a frame: a chat may have hundreds of others.

import { useEffect, useState } from "preact/hooks";
import { ApiError, keyKept, request } from "./api";
import { type Chat, type Message, newChat, removeMessage } from "./chats";
import { loadChats, removeChat, saveChat, watchDatabase } from "./database";
import { dropDrafts } from "./drafts";
import type { Defaults, Settings } from "./options";
import { type Tool, findTools } from "./tools";

export interface Model {
  id: string;
  status?: { value: string; failed?: boolean; unloadable?: boolean };
  meta?: Record<string, unknown> | null;
  architecture?: { input_modalities?: string[] };
}

interface Props {
  default_generation_settings: { n_ctx: number; params: Defaults };
  build_info: string;
  total_slots?: number;
  tools?: boolean;
}

interface Notice {
  text: string;
  undo?: () => void;
}

type Panel = "settings" | "tools" | "live" | "key" | "about" | "";

const POLL_MS = 1000;
const DEFAULTS = "quengine.defaults";

export const state = {
  chats: [] as Chat[],
  chat: freshChat(),
  /** The id of the page's address, where no chat has it. */
  missing: "",
  /** The message that is to be edited, until its view opens the editor. */
  edit: "",
  models: [] as Model[],
  props: null as Props | null,
  tools: [] as Tool[],
  notice: null as Notice | null,
  panel: "" as Panel,
  sidebar: matchMedia("(min-width: 800px)").matches,
  /** Said to screen readers. */
  spoken: "",
};

/** By a chat's id, the answer that this tab has under way in it. */
export const answering = new Map<string, Message>();
const watchers = new Set<() => void>();
const growers = new Set<() => void>();
let drawn = true;

export function changed(): void {
  drawn = true;
  for (const watcher of watchers) watcher();
}

function growing(): void {
  if (!drawn) return;
  drawn = false;
  const draw = (): void => {
    drawn = true;
    for (const grower of growers) grower();
  };
  if (document.hidden)
    setTimeout(draw, 200); // no frames are drawn then
  else requestAnimationFrame(draw);
}

function useDrawing(set: Set<() => void>, on: boolean): void {
  const [, draw] = useState(0);
  useEffect(() => {
    if (!on) return;
    const watcher = (): void => draw(count => count + 1);
    set.add(watcher);
    return () => void set.delete(watcher);
  }, [on]);
}

export function useStore(): typeof state {
  useDrawing(watchers, true);
  return state;
}

/** Be drawn again while an answer grows, if `on`. */
export const useGrowth = (on: boolean): void => useDrawing(growers, on);

export const isNarrow = (): boolean => !matchMedia("(min-width: 800px)").matches;

export function show(panel: Panel): void {
  state.panel = panel;
  changed();
}

let noticeTimer = 0;
export function notify(text: string, undo?: () => void): void {
  state.notice = undo ? { text, undo } : { text };
  window.clearTimeout(noticeTimer);
  noticeTimer = window.setTimeout(() => dismiss(), 8000);
  changed();
}

export function dismiss(): void {
  state.notice = null;
  changed();
}

export function speak(text: string): void {
  state.spoken = text;
  changed();
}

/** What a request threw, as a notice; one that lacks a key opens the dialog that asks for it. */
export function report(error: unknown): void {
  if (error instanceof ApiError && error.status === 401) show("key");
  else notify((error as Error).message);
}

function freshChat(): Chat {
  try {
    const { settings, model } = JSON.parse(localStorage.getItem(DEFAULTS) ?? "{}") as {
      settings?: Settings;
      model?: string;
    };
    return newChat(settings ?? {}, model);
  } catch {
    return newChat({});
  }
}

export function keepDefaults(chat: Chat): void {
  localStorage.setItem(DEFAULTS, JSON.stringify({ settings: chat.settings, model: chat.model }));
}

/** Chats of earlier visits, and the one that the page's address names. */
export async function start(): Promise<void> {
  watchDatabase(
    error => notify(`This chat cannot be kept: ${(error as Error).message}`),
    otherTab,
  );
  try {
    const loaded = await loadChats();
    state.chats.push(...loaded);
    dropDrafts(loaded);
  } catch (error) {
    notify(`Chats cannot be kept in this browser: ${(error as Error).message}`);
  }
  sort();
  followAddress();
  addEventListener("hashchange", followAddress);
}

/** A chat's address is #/chat/ID, that of a new one #/. */
function addressOf(chat: Chat): string {
  return state.chats.includes(chat) ? `#/chat/${chat.id}` : "#/";
}

function setAddress(chat: Chat, replace: boolean): void {
  const address = addressOf(chat);
  if ((location.hash || "#/") === address) return;
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
}

/** Show the chat that the page's address names, such as after Back. */
function followAddress(): void {
  const id = location.hash.replace(/^#\/?(chat\/)?/, "");
  const chat = state.chats.find(each => each.id === id);
  state.missing = chat ? "" : id;
  if (chat) state.chat = chat;
  else if (id || state.chats.includes(state.chat)) state.chat = freshChat();
  if (isNarrow()) state.sidebar = false;
  changed();
}

/** What another tab has written or, without a chat, removed. */
function otherTab(id: string, written?: Chat): void {
  const here = state.chats.find(chat => chat.id === id);
  const mine = answering.get(id);
  if (mine) {
    // Both tabs write in it: what the other has, and the answer that is under way here.
    if (here && written) here.messages = { ...here.messages, ...written.messages, [mine.id]: mine };
    return;
  }
  if (here && written && written.saved <= here.saved) return;
  state.chats = state.chats.filter(chat => chat.id !== id);
  if (written) {
    state.chats.push(written);
    if (state.chat.id === id) state.chat = written;
    if (state.missing === id) followAddress();
  } else if (state.chat.id === id) beginChat(true);
  sort();
  changed();
}

const sort = (): void => void state.chats.sort((a, b) => b.updated - a.updated);

/** The server's models, its defaults and what it is. */
export async function describe(): Promise<void> {
  try {
    const models = (await (await request("v1/models")).json()) as { data: Model[] };
    state.models = models.data;
    const model = modelOf(state.chat);
    const address = statusOf(model) === "loaded" ? `props?model=${encodeURIComponent(model)}` : "props";
    state.props = (await (await request(address)).json()) as Props;
    if (state.props.tools && !state.tools.length) void findTools();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      if (keyKept()) notify("The server does not take the key that this page has.");
      show("key");
    }
  }
  changed();
}

export const statusOf = (id: string): string | undefined =>
  state.models.find(model => model.id === id)?.status?.value;

/** Look after the models for as long as one is being loaded. */
export async function followLoading(): Promise<void> {
  do {
    await new Promise(resolve => setTimeout(resolve, POLL_MS));
    await describe();
  } while (state.models.some(model => model.status?.value === "loading"));
}

/** The model that answers a chat: its own while the server has it, else the server's first. */
export function modelOf(chat: Chat): string {
  const names = state.models.map(model => model.id);
  return chat.model && (names.includes(chat.model) || !names.length) ? chat.model : (names[0] ?? "");
}

/** Whether the model that answers a chat reads images. */
export const sees = (chat: Chat): boolean =>
  state.models
    .find(model => model.id === modelOf(chat))
    ?.architecture?.input_modalities?.includes("image") ?? false;

/** A new chat, which is kept when its first message is sent. */
export function beginChat(replace = false): void {
  openChat(freshChat(), replace);
  if (!isNarrow()) document.getElementById("input")?.focus(); // where a keyboard would cover the screen
}

/** `replace`: the address of the chat before is no more. */
export function openChat(chat: Chat, replace = false): void {
  state.chat = chat;
  state.missing = "";
  setAddress(chat, replace);
  if (isNarrow()) state.sidebar = false;
  changed();
}

/** Keep a chat that has changed; `soon`: it goes on growing. */
export function keep(chat: Chat, soon = false): void {
  if (!chat.leaf && !Object.keys(chat.messages).length) return changed();
  if (!state.chats.includes(chat)) state.chats.push(chat);
  if (chat === state.chat) {
    state.missing = "";
    setAddress(chat, true);
  }
  sort();
  saveChat(chat, soon);
  if (soon) growing();
  else changed();
}

export function deleteChat(chat: Chat): void {
  state.chats = state.chats.filter(other => other !== chat);
  void removeChat(chat.id);
  if (state.chat === chat) beginChat(true);
  notify(`Deleted “${chat.title}”`, () => {
    keep(chat);
    if (state.missing === chat.id) followAddress();
  });
}

export function deleteMessage(chat: Chat, message: Message): void {
  const before = { messages: { ...chat.messages }, leaf: chat.leaf };
  removeMessage(chat, message);
  keepOrRemove(chat);
  notify("Deleted the message and what followed it", () => {
    Object.assign(chat, before);
    keep(chat);
  });
}

function keepOrRemove(chat: Chat): void {
  if (Object.keys(chat.messages).length) return keep(chat);
  state.chats = state.chats.filter(other => other !== chat);
  void removeChat(chat.id);
  if (chat === state.chat) setAddress(chat, true);
  changed();
}
