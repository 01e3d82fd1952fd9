"""Exports.d: exports(5) with the options of [SZ], as typed values, from text and back.

[SZ] is Spadavecchia & Zadok, "Enhancing NFS Cross-Administrative Domain Access", 2002. Pure, but for `files`.
"""
