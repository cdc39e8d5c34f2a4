// What the pages gain from a script; without it they work, in UTC and without the copy button.
"use strict";

const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

for (const time of document.querySelectorAll("time[datetime]")) {
  const moment = new Date(time.dateTime);
  if (!Number.isNaN(moment.getTime())) {
    time.title = time.textContent;
    time.textContent = local.format(moment);
  }
}

for (const button of document.querySelectorAll("[data-copy]")) {
  const secret = document.getElementById(button.dataset.copy);
  if (!secret) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(secret.textContent);
      button.textContent = "Copied";
    } catch {
      // No clipboard, as on a page without TLS: have it selected, so that one key copies it.
      getSelection().selectAllChildren(secret);
      button.textContent = "Selected";
    }
  });
}

for (const form of document.querySelectorAll("form[data-confirm]")) {
  form.addEventListener("submit", (event) => {
    if (!confirm(form.dataset.confirm)) event.preventDefault();
  });
}

for (const select of document.querySelectorAll("select[data-submit]")) {
  select.addEventListener("change", () => select.form.requestSubmit());
}

// On a phone the tabs don't all fit: show the one that is open.
const tab = document.querySelector(".tabs [aria-current]");
if (tab) tab.parentElement.scrollLeft = tab.offsetLeft - (tab.parentElement.clientWidth - tab.offsetWidth) / 2;

// A menu closes when one turns to something else.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});

// The answer to a form that showed a secret: reloading it must ask for the page, not send the form again.
const once = document.querySelector("[data-page]");
if (once) history.replaceState(null, "", once.dataset.page);
