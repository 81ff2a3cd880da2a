// The search of pages that are opened from the file system, where browsers start no Worker:
// the worker's script runs in a hidden frame instead. The theme asks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame.contentWindow
      const page = frame.contentDocument
      page.open() // Firefox would replace the first document by another one
      page.write("<!doctype html><body></body>")
      page.close()
      this.frame.postMessage = data =>
        this.dispatchEvent(new MessageEvent("message", {data}))
      const script = page.createElement("script")
      script.src = url
      this.loaded = new Promise(resolve => (script.onload = resolve))
      page.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
  window.Worker = window.IFrameWorker
}
