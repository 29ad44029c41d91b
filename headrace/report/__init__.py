"""`headrace report`: one self-contained HTML page about runs, from the files that they left.

`collect` reads a run's directory, `catalogue` says which charts there are, `chart` draws one as SVG, `page`
puts them together. The page makes no request: style, script and pictures are in it, and its
Content-Security-Policy forbids any other.
"""
