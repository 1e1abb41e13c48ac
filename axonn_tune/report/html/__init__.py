"""The report: one self-contained HTML file. Python decides every number and word; the page's script only draws."""
