"""`headrace report`: one self-contained HTML page about runs, made from their files.

`collect` reads a run's directory, `catalogue` lists the charts, `chart` draws one as SVG, and `page`
assembles them. The page makes no requests: it embeds style, script and pictures, and its
Content-Security-Policy forbids all others.
"""
