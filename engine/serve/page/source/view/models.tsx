// The model that answers this chat: chosen among the server's, loaded and unloaded where the server does that.

import { ChevronDown, Info } from "lucide-preact";
import type { JSX } from "preact";
import { request } from "../state/api";
import {
  type Model,
  describe,
  followLoading,
  keep,
  keepDefaults,
  modelOf,
  report,
  show,
  state,
  statusOf,
  useStore,
} from "../state/store";
import { Dialog, type Entry, Menu } from "./widgets";

const shownStatus = (model: Model): string => (model.status?.failed ? "failed" : (model.status?.value ?? ""));

async function act(action: "load" | "unload", model: string): Promise<void> {
  try {
    await request(`models/${action}`, { model });
    await followLoading();
  } catch (error) {
    report(error);
  }
}

export function ModelPicker(): JSX.Element {
  useStore();
  const current = modelOf(state.chat);
  const choose = (id: string): void => {
    state.chat.model = id;
    keepDefaults(state.chat);
    keep(state.chat);
    void describe();
  };
  const entries: Entry[] = state.models.map(each => ({
    label: each.id,
    detail: state.models.length > 1 ? shownStatus(each) : "",
    checked: each.id === current,
    act: () => choose(each.id),
  }));
  const status = statusOf(current);
  if (status === "unloaded") entries.push({ label: `Load ${current}`, act: () => void act("load", current) });
  if (state.models.find(each => each.id === current)?.status?.unloadable)
    entries.push({ label: `Unload ${current}`, act: () => void act("unload", current) });
  entries.push({ label: "About this model", icon: Info, act: () => show("about") });
  return (
    <Menu
      label={`Model: ${current || "none"}`}
      class="picker"
      onOpen={() => void describe()}
      entries={entries}
      button={
        <>
          <span class="name">{current || "quengine"}</span>
          <ChevronDown size={15} aria-hidden="true" />
        </>
      }
    />
  );
}

const NAMES: Record<string, string> = {
  architecture: "Architecture",
  n_params: "Parameters",
  size: "Weights",
  memory: "Memory",
  n_ctx: "Context",
  n_ctx_train: "Context in training",
  n_vocab: "Vocabulary",
  n_embd: "Embedding",
  device: "Device",
  cache_type: "KV cache",
};

const BYTES = ["size", "memory"];

function shownValue(key: string, value: unknown): string {
  if (typeof value !== "number") return String(value);
  return BYTES.includes(key) ? `${(value / 2 ** 20).toFixed(1)} MiB` : value.toLocaleString("en");
}

export function About(): JSX.Element {
  useStore();
  const current = modelOf(state.chat);
  const meta = state.models.find(each => each.id === current)?.meta ?? {};
  const facts: [string, unknown][] = [
    ...Object.entries(meta),
    ["Slots", state.props?.total_slots ?? ""],
    ["Server", state.props?.build_info ?? ""],
  ];
  return (
    <Dialog title={current || "The model"} onClose={() => show("")}>
      <table class="facts">
        <tbody>
          {facts.map(([key, value]) => (
            <tr key={key}>
              <th scope="row">{NAMES[key] ?? key}</th>
              <td>{shownValue(key, value)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Dialog>
  );
}
