"""Programs that nobody has read, run where they can do no harm; what they return comes back as data.

Doors: `sandbox.Sandbox` with `Program`, `Call` and `SandboxLimits`; `doctor.examine` tries what holds here.
Backends: `native` (this machine: `server` forks slots, slots fork jobs) and `remote` (a service by URL).
`namespaces`, `seccomp`, `cgroups` and `limits` hold a program; `protocol`, `values`, `proxies` and `exceptions` carry
data in and out; `job` runs the program. A job's own modules import nothing else of Hone.
May import: errors.
"""
