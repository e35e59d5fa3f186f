// The settings of a chat, and the request fields that they become. A sampler is offered where the server's /props names
// it among its defaults, so that the page has those that the server has.

export interface Settings {
  system?: string;
  stop?: string;
  schema?: string;
  effort?: string;
  probabilities?: boolean;
  /** Names of the tools that the model may call. */
  tools?: string[];
  values?: Record<string, number | boolean | string[]>;
}

export interface Option {
  key: string;
  label: string;
  help: string;
  kind?: "switch" | "list";
  min?: number;
  max?: number;
  step?: number;
  /** Also offered where /props does not name it. */
  always?: boolean;
  /** Another field that /props must name. */
  needs?: string;
}

export const GROUPS: { name: string; options: Option[] }[] = [
  {
    name: "Length",
    options: [
      {
        key: "max_tokens",
        label: "Max tokens",
        help: "Most tokens of an answer",
        min: 1,
        step: 1,
        always: true,
      },
      {
        key: "min_tokens",
        label: "Min tokens",
        help: "No end before so many",
        min: 0,
        step: 1,
        always: true,
      },
      { key: "ignore_eos", label: "Ignore end tokens", help: "Go on until the limit", kind: "switch" },
      {
        key: "context_shift",
        label: "Context shift",
        help: "Discard old tokens of a full context and go on",
        kind: "switch",
        always: true,
      },
      {
        key: "n_keep",
        label: "Tokens kept",
        help: "First tokens that a context shift keeps; -1: the prompt",
        min: -1,
        step: 1,
      },
      {
        key: "n_discard",
        label: "Tokens discarded",
        help: "By a context shift; 0: half of the others",
        min: 0,
        step: 1,
      },
    ],
  },
  {
    name: "Sampling",
    options: [
      {
        key: "seed",
        label: "Seed",
        help: "Gives the same answer again; -1 draws one",
        min: -1,
        step: 1,
        always: true,
      },
      { key: "temperature", label: "Temperature", help: "0 takes the likeliest token", min: 0, step: 0.1 },
      { key: "top_k", label: "Top-k", help: "Keep so many of the likeliest; 0: all", min: -1, step: 1 },
      { key: "top_p", label: "Top-p", help: "Keep the likeliest up to this sum", min: 0, max: 1, step: 0.01 },
      {
        key: "min_p",
        label: "Min-p",
        help: "Drop those below this share of the likeliest",
        min: 0,
        max: 1,
        step: 0.01,
      },
      {
        key: "typical_p",
        label: "Typical-p",
        help: "Keep those of typical surprise; 1: all",
        min: 0,
        max: 1,
        step: 0.01,
      },
      {
        key: "top_n_sigma",
        label: "Top-n-sigma",
        help: "Keep logits within n deviations of the highest; -1: all",
        min: -1,
        step: 0.1,
      },
      {
        key: "dynatemp_range",
        label: "Dynamic temperature",
        help: "Range around the temperature; 0: off",
        min: 0,
        step: 0.1,
      },
      {
        key: "dynatemp_exponent",
        label: "Dynamic exponent",
        help: "How entropy moves the temperature",
        min: 0,
        step: 0.1,
      },
      {
        key: "xtc_probability",
        label: "XTC probability",
        help: "How often the likeliest are dropped; 0: off",
        min: 0,
        max: 1,
        step: 0.05,
      },
      {
        key: "xtc_threshold",
        label: "XTC threshold",
        help: "Drops tokens above it, but one",
        min: 0,
        max: 1,
        step: 0.05,
      },
      {
        key: "mirostat",
        label: "Mirostat",
        help: "0: off, 1 or 2: its version",
        min: 0,
        max: 2,
        step: 1,
        needs: "mirostat_tau",
      },
      { key: "mirostat_tau", label: "Mirostat tau", help: "Surprise to aim for", min: 0, step: 0.1 },
      { key: "mirostat_eta", label: "Mirostat eta", help: "Learning rate", min: 0, step: 0.01 },
      { key: "samplers", label: "Samplers", help: "Their order, by commas", kind: "list" },
    ],
  },
  {
    name: "Penalties",
    options: [
      {
        key: "repeat_penalty",
        label: "Repeat penalty",
        help: "Divides logits of recent tokens; 1: none",
        min: 0.01,
        step: 0.05,
      },
      {
        key: "repeat_last_n",
        label: "Repeat window",
        help: "Tokens the penalties look at; -1: all",
        min: -1,
        step: 1,
      },
      {
        key: "presence_penalty",
        label: "Presence penalty",
        help: "Subtracted from every recent token",
        step: 0.1,
      },
      {
        key: "frequency_penalty",
        label: "Frequency penalty",
        help: "Subtracted each time a token came",
        step: 0.1,
      },
      {
        key: "dry_multiplier",
        label: "DRY multiplier",
        help: "Penalty of repeated sequences; 0: off",
        min: 0,
        step: 0.1,
      },
      { key: "dry_base", label: "DRY base", help: "Growth with the sequence's length", min: 1, step: 0.05 },
      {
        key: "dry_allowed_length",
        label: "DRY allowed length",
        help: "Repeats up to it cost nothing",
        min: 0,
        step: 1,
      },
      {
        key: "dry_penalty_last_n",
        label: "DRY window",
        help: "Tokens it looks at; -1: all",
        min: -1,
        step: 1,
      },
      {
        key: "dry_sequence_breakers",
        label: "DRY breakers",
        help: "End a sequence; by commas",
        kind: "list",
      },
    ],
  },
];

export const EFFORTS = [
  ["", "Default"],
  ["none", "Off"],
  ["minimal", "Minimal"],
  ["low", "Low"],
  ["medium", "Medium"],
  ["high", "High"],
  ["xhigh", "Extra high"],
] as const;

export type Defaults = Record<string, unknown>;

export const offered = (option: Option, defaults: Defaults): boolean =>
  option.always === true ||
  (option.key in defaults && (option.needs === undefined || option.needs in defaults));

/** How the server's own value of an option reads. */
export function defaultText(option: Option, defaults: Defaults): string {
  const value = defaults[option.key];
  if (option.key === "max_tokens" && value === -1) return "no limit";
  if (option.key === "seed" && value === -1) return "random";
  if (Array.isArray(value)) return textOf(value);
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : "";
}

/** What is wrong with a JSON schema's text; "" if nothing is. */
export function schemaProblem(text: string): string {
  if (!text.trim()) return "";
  try {
    const schema: unknown = JSON.parse(text);
    return schema !== null && typeof schema === "object" && !Array.isArray(schema)
      ? ""
      : "A schema is a JSON object.";
  } catch (error) {
    return `Not JSON: ${(error as Error).message}`;
  }
}

/** The parts of a text field, in which \n and \t stand for what they are in code. */
export function partsOf(text: string, separator: string): string[] {
  const read = (part: string): string =>
    part.replace(/\\([nt\\"])/g, (_, c: string) => ({ n: "\n", t: "\t" })[c] ?? c);
  const parts = text.split(separator);
  return (separator === "\n" ? parts : parts.map(part => part.trim())).filter(Boolean).map(read);
}

/** What `partsOf` reads again. */
export const textOf = (parts: unknown[]): string =>
  parts.map(part => JSON.stringify(part).slice(1, -1)).join(", ");

/** The fields of a chat completion that the settings become. Throws Error for a schema that is none. */
export function fieldsOf(settings: Settings): Record<string, unknown> {
  const fields: Record<string, unknown> = { ...settings.values };
  const stop = partsOf(settings.stop ?? "", "\n");
  if (stop.length) fields.stop = stop;
  if (settings.effort === "none") fields.enable_thinking = false;
  else if (settings.effort) fields.reasoning_effort = settings.effort;
  if (settings.probabilities) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  if (settings.schema?.trim()) {
    const problem = schemaProblem(settings.schema);
    if (problem) throw new Error(`The JSON schema of this chat's settings: ${problem}`);
    const schema: unknown = JSON.parse(settings.schema);
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return fields;
}
