// Sends the one-time code in the fragment, or the token that was typed, and goes on to the page that was asked for.
"use strict";

const words = document.getElementById("words");
const form = document.getElementById("form");
const next = new URLSearchParams(location.search).get("next") || "/";

async function begin(credential) {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const body = JSON.stringify({ ...credential, zone, next });
  const answer = await fetch("/session", { method: "POST", body, headers: { "Content-Type": "application/json" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.detail);
  location.replace(found.next);
}

const scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.cookie = `falaj_scheme=${scheme}; Path=/; Max-Age=31536000; SameSite=Strict`;

function fail(error) {
  words.textContent = error.message;
  words.className = "bad";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  begin({ token: form.token.value.trim() }).catch(fail);
});

const code = new URLSearchParams(location.hash.slice(1)).get("code");
if (code) {
  history.replaceState(null, "", location.pathname + location.search);
  words.textContent = "Signing you in …";
  begin({ code }).catch(fail);
}
