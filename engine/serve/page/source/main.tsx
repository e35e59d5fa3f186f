// Where the page starts.

import { render } from "preact";
import { resumeAnswers } from "./state/generation";
import { describe, isNarrow, start } from "./state/store";
import { App } from "./view/app";
import { watchServer } from "./view/live";
import { applyTheme } from "./view/sidebar";

applyTheme();
void start().then(() => {
  resumeAnswers();
  render(<App />, document.body);
  if (!isNarrow()) document.getElementById("input")?.focus();
  void describe();
  void watchServer();
});
