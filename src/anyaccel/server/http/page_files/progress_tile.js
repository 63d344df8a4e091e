// Tile of one unfinished result: preview and progress bar.
import { h } from "./dom.js";

export class ProgressTile {
  constructor({ prompt, size }, index, count) {
    this.done = this.total = 0;
    this.image = h("img", { alt: "", hidden: true });
    this.prompt = prompt;
    this.frame = h("div", { class: size ? "frame" : "frame flat" }, this.image);
    if (size) this.frame.style.aspectRatio = size.replace("x", " / ");
    this.bar = h("progress", { max: 1, value: 0, "aria-label": count > 1 ? `Progress of image ${index + 1} of ${count}` : "Progress" });
    this.element = h("li", { class: "running" }, this.frame, this.bar);
  }

  begin(progress) {
    this.done = this.total = 0;
    this.bar.value = progress;
  }

  step(done, total) {
    [this.done, this.total] = [done, total];
    this.bar.value = done / total;
  }

  preview(url) {
    if (!url.startsWith("data:image/")) return;
    this.image.src = url;
    this.image.alt = `Preview: ${this.prompt}`;
    this.image.hidden = false;
    this.frame.classList.add("has-preview");
  }
}
