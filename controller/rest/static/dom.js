// Elements of the page: shorthands to find, make and change them. Text is always set as text.

export const $ = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export function option(value, text, selected = false) {
  const element = make("option", "", text);
  element.value = value;
  element.selected = selected;
  return element;
}

export function button(className, text, onClick) {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}
