// A button on each block of code that copies it; without a clipboard, as on a page opened from a file, it selects it.
"use strict";

const copyBlock = async (button, block) => {
  try {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(block);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
};

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight pre")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this block");
    button.addEventListener("click", () => copyBlock(button, block));
    block.before(button);
  }
});
