// The settings of the open chat: what it says to the model, how long it reasons, and every sampler that the server has.

import type { JSX } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import {
  EFFORTS,
  GROUPS,
  type Option,
  type Settings,
  defaultText,
  offered,
  partsOf,
  schemaProblem,
  textOf,
} from "../state/options";
import { keep, keepDefaults, notify, show, state, useStore } from "../state/store";
import { Dialog, Switch } from "./widgets";

function change(next: Partial<Settings>): void {
  state.chat.settings = { ...state.chat.settings, ...next };
  keep(state.chat);
}

function setValue(key: string, value: number | boolean | string[] | undefined): void {
  const values = { ...state.chat.settings.values };
  if (value === undefined) delete values[key];
  else values[key] = value;
  change({ values });
}

interface TextProps {
  name: "system" | "stop" | "schema";
  label: string;
  help: string;
  rows: number;
  problem?: string;
}

function TextField({ name, label, help, rows, problem }: TextProps): JSX.Element {
  return (
    <label class="field tall">
      <span>{label}</span>
      <textarea
        id={name}
        rows={rows}
        value={state.chat.settings[name] ?? ""}
        aria-describedby={`${name}-help`}
        aria-invalid={Boolean(problem)}
        onInput={event => change({ [name]: event.currentTarget.value })}
      />
      <small id={`${name}-help`} class={problem ? "problem" : ""}>
        {problem || help}
      </small>
    </label>
  );
}

/** What is wrong with a number, in the browser's words. Only a step of 1 is a rule: others are for the arrows. */
function problemOf(field: HTMLInputElement | null): string {
  if (!field) return "";
  const { rangeUnderflow, rangeOverflow, badInput, stepMismatch } = field.validity;
  const wrong = rangeUnderflow || rangeOverflow || badInput || (stepMismatch && field.step === "1");
  return wrong ? field.validationMessage : "";
}

function OptionField({ option }: { option: Option }): JSX.Element {
  const { key, label, help, kind } = option;
  const field = useRef<HTMLInputElement>(null);
  const [problem, setProblem] = useState("");
  useLayoutEffect(() => setProblem(problemOf(field.current)), []);
  const value = state.chat.settings.values?.[key];
  const defaults = state.props?.default_generation_settings.params ?? {};
  if (kind === "switch") {
    const usual = defaults[key] === true;
    const on = value === undefined ? usual : value === true;
    return (
      <Switch
        id={key}
        label={label}
        help={help}
        value={on}
        set={now => setValue(key, now === usual ? undefined : now)}
      />
    );
  }
  const placeholder = defaultText(option, defaults);
  const onInput = ({ currentTarget: { value: text } }: { currentTarget: HTMLInputElement }): void => {
    setProblem(problemOf(field.current));
    if (kind === "list") return setValue(key, text.trim() ? partsOf(text, ",") : undefined);
    setValue(key, text === "" ? undefined : Number(text));
  };
  const range =
    kind === "list"
      ? { type: "text" }
      : { type: "number", min: option.min, max: option.max, step: option.step };
  return (
    <label class={kind === "list" ? "field tall" : "field"}>
      <span>{label}</span>
      <input
        ref={field}
        id={key}
        {...range}
        defaultValue={Array.isArray(value) ? textOf(value) : value?.toString()}
        placeholder={placeholder}
        aria-describedby={`${key}-help`}
        aria-invalid={Boolean(problem)}
        onInput={onInput}
      />
      <small id={`${key}-help`} class={problem ? "problem" : ""}>
        {problem || help}
      </small>
    </label>
  );
}

function Effort(): JSX.Element {
  return (
    <label class="field">
      <span>Reasoning effort</span>
      <select
        id="effort"
        value={state.chat.settings.effort ?? ""}
        onChange={event => change({ effort: event.currentTarget.value })}
      >
        {EFFORTS.map(([value, label]) => (
          <option key={value} value={value}>
            {label}
          </option>
        ))}
      </select>
      <small>For models that reason</small>
    </label>
  );
}

export function SettingsDialog(): JSX.Element {
  const { chat, props } = useStore();
  const defaults = props?.default_generation_settings.params ?? {};
  const reset = (): void => {
    const before = chat.settings;
    chat.settings = {};
    keep(chat);
    show("");
    notify("This chat has the server's settings", () => {
      chat.settings = before;
      keep(chat);
    });
  };
  const keepAll = (): void => {
    keepDefaults(chat);
    notify("New chats begin with these settings");
  };
  return (
    <Dialog title="Settings of this chat" class="sheet" onClose={() => show("")}>
      <TextField name="system" label="System message" help="Comes before the first message" rows={3} />
      <Effort />
      <Switch
        id="probabilities"
        label="Token probabilities"
        help="Kept with each answer, to look at"
        value={chat.settings.probabilities === true}
        set={probabilities => change({ probabilities })}
      />
      {GROUPS.map(group => (
        <fieldset key={group.name}>
          <legend>{group.name}</legend>
          {group.options
            .filter(option => offered(option, defaults))
            .map(option => (
              <OptionField key={option.key} option={option} />
            ))}
        </fieldset>
      ))}
      <fieldset>
        <legend>Form of the answer</legend>
        <TextField name="stop" label="Stop strings" help="One a line; \n is a line break" rows={2} />
        <TextField
          name="schema"
          label="JSON schema"
          help="Answers are JSON that is valid under it"
          rows={4}
          problem={schemaProblem(chat.settings.schema ?? "")}
        />
      </fieldset>
      <footer>
        <button type="button" onClick={reset}>
          Server's defaults
        </button>
        <button type="button" onClick={keepAll}>
          Use for new chats
        </button>
      </footer>
    </Dialog>
  );
}
