"""/docs: one page that shows /openapi.json, with nothing from anywhere else."""

from __future__ import annotations

DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pagedinfer: API</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; }
summary { cursor: pointer; padding: .4rem 0; }
.method { display: inline-block; min-width: 3.5rem; font-weight: bold; text-transform: uppercase; }
details details { margin-left: 1rem; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .25rem .5rem; vertical-align: top; }
td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } }
</style>
</head>
<body>
<h1>pagedinfer</h1>
<p>The schema itself: <a href="openapi.json">openapi.json</a></p>
<main id="routes">Loading</main>
<script>
function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}
function resolve(schema, api) {
  if (!schema || !schema.$ref) return schema || {};
  return schema.$ref.slice(2).split("/").reduce((value, key) => value[key], api);
}
function kind(schema, api) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(each => kind(each, api)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map(each => JSON.stringify(each)).join(" or ");
  if (schema.type === "array") return "list of " + kind(schema.items || {}, api);
  return schema.type || "anything";
}
function table(schema, api) {
  const body = resolve(schema, api);
  const rows = Object.entries(body.properties || {}).map(([name, value]) => {
    const needed = (body.required || []).includes(name) ? " (required)" : "";
    return element("tr", "", element("td", name), element("td", kind(value, api) + needed),
                   element("td", value.description || ""));
  });
  return element("table", "", ...rows);
}
function part(title, schema, api) {
  return element("details", "", element("summary", title), table(schema, api));
}
fetch("openapi.json").then(answer => answer.json()).then(api => {
  const routes = document.getElementById("routes");
  routes.replaceChildren();
  for (const [path, operations] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(operations)) {
      const name = element("span", method);
      name.className = "method";
      const route = element("details", "",
        element("summary", "", name, element("code", path), " " + (operation.description || "")));
      const body = operation.requestBody && operation.requestBody.content["application/json"];
      if (body) route.append(part("request: " + kind(body.schema, api), body.schema, api));
      for (const [status, answer] of Object.entries(operation.responses))
        for (const [type, content] of Object.entries(answer.content || {}))
          route.append(part(status + " " + answer.description + ": " + type, content.schema, api));
      routes.append(route);
    }
}).catch(error => { document.getElementById("routes").textContent = "no schema: " + error; });
</script>
</body>
</html>
"""
