"""The report of a run as one HTML page that opens offline: table, curves, signs of reward hacking, samples.

Door: `report.write_report`. All text of a model is escaped (`page.text`), and the page may load nothing.
`hone report` and the demo import it. May import: log.
"""
