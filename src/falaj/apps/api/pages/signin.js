// Spends the one-time code in the fragment, then shows who the platform takes the caller for.
"use strict";

const words = document.getElementById("words");
const facts = document.getElementById("facts");

function show(rows) {
  for (const [name, value] of rows) {
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    facts.append(dt, dd);
  }
}

async function ask(path, token) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail);
  return body;
}

async function signIn() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  history.replaceState(null, "", location.pathname);
  if (!code) {
    words.textContent = "Open the sign-in link that 'falaj up' or 'falaj tokens sign-in-link' printed.";
    return;
  }
  const answer = await fetch("/signin", { method: "POST", body: JSON.stringify({ code }) });
  const issued = await answer.json();
  if (!answer.ok) throw new Error(issued.detail);
  const me = await ask("/api/v1/users/whoami", issued.secret);
  const platform = await ask("/api/v1/platform/status", issued.secret);
  words.textContent = `You are signed in as ${me.principal.name}. This is the API; the console does not run here.`;
  show([
    ["roles", me.grants.map((grant) => `${grant.role} in ${grant.workspace}`).join(", ") || "none"],
    ["zones", platform.zones.map((zone) => `${zone.name} (${zone.jurisdiction})`).join(", ")],
    ["controller", platform.controller || "none acts"],
    ["version", platform.version],
    ["until", new Date(issued.token.expires_at).toLocaleString()],
  ]);
}

signIn().catch((error) => { words.textContent = error.message; });
