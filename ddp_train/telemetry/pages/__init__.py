"""Pages: a run, a sweep, a study or a comparison as one HTML file that loads nothing. Torch-free.

Everything here takes files and plain values and returns text, but for `page.write` and
`live.LivePage`.
"""
