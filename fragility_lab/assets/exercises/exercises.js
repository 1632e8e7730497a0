"use strict";
// Questions of a lesson: asked, checked and remembered in the browser. No kernel is asked.
// A page has this file in one line: a comment has a line of its own, and every statement ends with its sign.
// fragility_lessons/exercises.py gives the questions, and reads numbers in the same way.

(() => {
  // The event that tells others on the page of an answer, and what a browser has that refuses to store anything.
  const CHANGED = "lesson-answers";
  const memory = (window.lessonAnswers ??= {});

  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  // --- What is remembered: in the browser, and in JupyterLab in the notebook's metadata ---
  const key = (name) => `fragility-lessons:${name}`;
  function load(name) {
    try { return JSON.parse(localStorage.getItem(key(name))) ?? memory[name]; } catch { return memory[name]; }
  }
  function keep(name, value) {
    memory[name] = value;
    try { localStorage.setItem(key(name), JSON.stringify(value)); } catch { /* told by "stores" */ }
  }
  function stores() {
    try { localStorage.setItem(key("try"), "1"); localStorage.removeItem(key("try")); return true; } catch { return false; }
  }
  // jupyter_server_config.py has JupyterLab show itself to the page. Elsewhere there is no notebook to write to.
  function notebookOf(root) {
    try {
      for (const panel of window.jupyterapp.shell.widgets("main")) {
        if (panel.node.contains(root) && panel.content.model?.setMetadata) return panel.content.model;
      }
    } catch { /* another JupyterLab */ }
    return null;
  }
  const isRecord = (value) => value && typeof value === "object" && value.answers && typeof value.answers === "object";
  const isEntry = (value) => value && typeof value.answer === "string" && Array.isArray(value.wrong);

  // The record of a lesson; of two answers to a question, the later one counts.
  function read(root, lesson) {
    const sources = [notebookOf(root)?.getMetadata("lesson_answers")?.[lesson], load(lesson)].filter(isRecord);
    const record = { answers: {}, cleared: sources.map((source) => source.cleared ?? "").sort().pop() ?? "" };
    for (const source of sources) {
      for (const [id, entry] of Object.entries(source.answers)) {
        const known = record.answers[id];
        if (isEntry(entry) && entry.time > record.cleared && !(known?.time > entry.time)) record.answers[id] = entry;
      }
    }
    return record;
  }
  function write(root, lesson, version, record) {
    const student = load("student") ?? "", whole = { lesson, version, student, ...record };
    keep(lesson, whole);
    const notebook = notebookOf(root);
    if (notebook) notebook.setMetadata("lesson_answers", { ...notebook.getMetadata("lesson_answers"), [lesson]: whole });
    document.dispatchEvent(new CustomEvent(CHANGED));
    return whole;
  }

  // --- Answers that are numbers ---
  const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺";
  const product = (values) => values.reduce((total, value) => total * value, 1);
  function float(text) {
    return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : NaN;
  }
  function power(text) {
    const parts = text.split("^").map(float);
    return parts.length > 2 ? NaN : parts.length === 2 ? parts[0] ** parts[1] : parts[0];
  }
  function value(text) {
    if (text.endsWith("%")) return value(text.slice(0, -1)) / 100;
    const [first, ...divisors] = text.split("/").map((part) => product(part.split("*").map(power)));
    return first / product(divisors);
  }
  function numbers(answer) {
    const text = answer.replace(/[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+/g, (found) => "^" + [...found].map((c) => "0123456789-+"[SUPERSCRIPTS.indexOf(c)]).join(""))
      .replace(/[–−]/g, "-").replace(/[×·∙]/g, "*").replace(/[\s_']/g, "").replaceAll("**", "^");
    const thousands = text.replace(/(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?!\d)/g, (found) => found.replaceAll(",", ""));
    return [thousands, text.replaceAll(",", ".")].map(value).filter(Number.isFinite);
  }

  // --- A question ---
  let serial = 0;

  function mountQuestion(root, { lesson, id, options, sealed, attempts, told, version }) {
    const { solution, tolerance, hint, explanation } = JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(sealed), (c) => c.charCodeAt(0))));
    const name = `lesson-exercise-${lesson}-${serial++}-${Math.random().toString(36).slice(2, 8)}`;
    const question = root.querySelector(".le-question");
    question.id = name;
    const verdict = element("p", { class: "le-verdict", role: "status" });
    const details = element("details", { hidden: "" }, element("summary", {}, "Explanation"), element("p"));
    details.lastChild.innerHTML = explanation;
    const button = element("button", { type: "button", class: "le-main", onclick: check }, "Check");
    const field = options.length
      ? element("div", { class: "le-options", role: "radiogroup", "aria-labelledby": name, onchange: forget },
        ...options.map((option) => element("label", {}, element("input", { type: "radio", name, value: option }), element("span", {}, option))))
      : element("input", { type: "text", "aria-labelledby": name, placeholder: "0.01, 1e-2, 1/100 or 1 %", autocomplete: "off", oninput: forget,
        onkeydown: (event) => { if (event.key === "Enter") check(); } });
    root.querySelector(".le-static").remove();
    root.append(...(options.length ? [field, element("div", { class: "le-row" }, button)] : [element("div", { class: "le-row" }, field, button)]), verdict, details);

    const given = () => (options.length ? field.querySelector(":checked")?.value : field.value.trim()) ?? "";
    const isRight = (answer) => (options.length ? answer === solution : numbers(answer).some((x) => Math.abs(x - solution) <= tolerance * Math.abs(solution)));
    const entry = () => read(root, lesson).answers[id];
    const over = (known) => known.correct || known.wrong.length >= attempts;

    function forget() { verdict.replaceChildren(); verdict.className = "le-verdict"; }
    function tell(right, text) {
      forget();
      verdict.classList.toggle("le-right", right === true);
      verdict.innerHTML = right ? "<b>Right.</b>" : `<b>Not yet.</b> Hint: ${text}`;
    }
    function explain(known) {
      details.hidden = !known;
      details.open = Boolean(known && over(known));
    }
    function check() {
      const answer = given();
      if (!answer) { forget(); verdict.textContent = "Answer first."; return; }
      if (!options.length && !numbers(answer).length) { forget(); verdict.textContent = `${told}“${answer}”.`; return; }
      const right = isRight(answer), record = read(root, lesson), known = record.answers[id] ?? { tries: 0, wrong: [], correct: false };
      const repeated = known.answer === answer || known.wrong.includes(answer);
      // What comes after the right answer is play.
      if (!known.correct && !repeated) {
        const wrong = right ? known.wrong : [...known.wrong, answer];
        record.answers[id] = { answer, tries: known.tries + 1, wrong, correct: right, time: new Date().toISOString() };
        write(root, lesson, version, record);
      }
      tell(right, hint);
      explain(record.answers[id]);
    }
    function restore() {
      const known = entry();
      if (options.length) for (const input of field.querySelectorAll("input")) input.checked = input.value === known?.answer;
      else field.value = known?.answer ?? "";
      if (known) tell(isRight(known.answer), hint); else forget();
      explain(known);
    }
    restore();
    // A cleared lesson asks anew; the same question elsewhere on the page shows the answer too.
    let last = JSON.stringify(entry());
    listen(root, () => { const now = JSON.stringify(entry()); if (now !== last && !root.contains(document.activeElement)) restore(); last = now; });
  }

  // While the component is on the page; JupyterLab takes it away when its cell runs again.
  function listen(root, act) {
    const heard = () => { if (root.isConnected) act(); };
    document.addEventListener(CHANGED, heard);
    addEventListener("storage", heard);
  }

  // --- The end of a lesson ---
  function mountProgress(root, { lesson, ids, version }) {
    const bar = element("progress", { max: ids.length, "aria-label": "answered questions" });
    const told = element("p", { role: "status" }), note = element("p", { class: "le-note" });
    const student = element("input", { type: "text", autocomplete: "name", value: load("student") ?? "", oninput: () => keep("student", student.value.trim()) });
    const clear = element("button", { type: "button", onclick: forgetAll, onblur: () => { clear.textContent = "Clear my answers"; } }, "Clear my answers");
    root.querySelector(":scope > .le-static").remove();
    root.append(bar, told, element("div", { class: "le-row" }, element("label", { class: "le-row" }, "Your name, if you hand them in ", student)),
      element("div", { class: "le-row" }, element("button", { type: "button", class: "le-main", onclick: save }, "Save my answers"), clear), note);

    function show() {
      const answers = ids.map((id) => read(root, lesson).answers[id]).filter(Boolean), right = answers.filter((each) => each.correct).length;
      bar.value = answers.length;
      told.textContent = `${answers.length} of ${ids.length} answered, ${right} of them right.`;
      note.textContent = notebookOf(root) ? "Answers are kept in this browser, and in the notebook when you save it."
        : stores() ? "Answers are kept in this browser." : "This browser keeps no answers once the page is closed. Save them.";
    }
    function save() {
      const record = read(root, lesson), whole = { lesson, version, student: student.value.trim(), saved: new Date().toISOString(), answers: record.answers };
      const address = URL.createObjectURL(new Blob([JSON.stringify(whole, null, 1)], { type: "application/json" }));
      const file = ["answers", lesson, whole.student.replace(/[^\p{L}\p{N}]+/gu, "-")].filter(Boolean).join("_");
      element("a", { href: address, download: `${file}.json` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10000);
    }
    function forgetAll() {
      if (clear.textContent !== "Clear them all?") { clear.textContent = "Clear them all?"; return; }
      write(root, lesson, version, { answers: {}, cleared: new Date().toISOString() });
      clear.textContent = "Clear my answers";
    }
    show();
    listen(root, show);
  }

  // --- JupyterLab and slides ---
  // No bars for folded code in a lesson: Python is where students write it. View > Expand Selected Code shows the rest.
  function hideBars(root) {
    root.closest(".jp-Notebook")?.classList.add("lesson");
    if (document.getElementById("lesson-bars")) return;
    document.head.append(element("style", { id: "lesson-bars" }, ".jp-Notebook.lesson .jp-InputPlaceholder { display: none }"));
  }

  // What is inside another comes first. One without its data is not read to its end yet.
  for (const root of [...document.querySelectorAll(".lesson-exercise:not([data-live])")].reverse()) {
    const data = root.querySelector(":scope > script[type='application/json']");
    if (!data) continue;
    root.setAttribute("data-live", "");
    // JupyterLab would take arrows and letters, and reveal.js the space bar.
    root.setAttribute("data-lm-suppress-shortcuts", "true");
    root.addEventListener("keydown", (event) => event.stopPropagation());
    hideBars(root);
    ({ question: mountQuestion, progress: mountProgress })[root.dataset.kind](root, JSON.parse(data.textContent));
  }
})();
