"""The system calls a sandboxed program may make, as a BPF filter put together by hand.

What is not on the list does not exist (ENOSYS), so that libraries fall back; 32-bit and x32 calls end the process.
Sockets are of the Unix family only: VSOCK lies outside network namespaces. No namespaces, no tracing, no keys, no BPF.
The files of the machine can be read, and nothing else: no locks on them that another job could see, no notices of who
opens them, no pushing them out of memory or asking whether they are in it.
"""

import platform
import struct

from hone.errors import HoneError

# name, number on x86_64, number on aarch64
TABLE = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24
124, mremap 25 216, msync 26 227, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer
36 102, alarm 37 -, setitimer 38 103, getpid 39 172, sendfile 40 71, connect 42 203, accept 43 202, sendto 44
206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, bind 49 200, listen 50 201, getsockname
51 204, getpeername 52 205, setsockopt 54 208, getsockopt 55 209, fork 57 -, vfork 58 -, execve 59 221, exit 60
93, wait4 61 260, kill 62 129, uname 63 160, fsync 74 82, fdatasync 75 83, truncate 76 45, ftruncate 77 46,
getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86
-, unlink 87 -, symlink 88 -, readlink 89 -, chmod 90 -, fchmod 91 52, umask 95 166, gettimeofday 96 169,
getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107
175, getegid 108 177, setpgid 109 154, getppid 110 173, getpgrp 111 -, setsid 112 157, getpgid 121 155, getsid
124 156, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, utime 132
-, statfs 137 43, fstatfs 138 44, getpriority 140 141, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, arch_prctl 158 -, setrlimit 160 164, gettid 186
178, tkill 200 130, time 201 -, futex 202 98, sched_setaffinity 203 122, sched_getaffinity 204 123, epoll_create
213 -, getdents64 217 61, set_tid_address 218 96, restart_syscall 219 128, fadvise64 221 223, timer_create 222
107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, clock_gettime
228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -, epoll_ctl 233 21,
tgkill 234 131, utimes 235 -, waitid 247 95, openat 257 56, mkdirat 258 34, futimesat 261 -, newfstatat 262 79,
unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78, fchmodat 268 53, faccessat
269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, get_robust_list 274 100, utimensat 280 88,
epoll_pwait 281 22, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, eventfd 284 -,
fallocate 285 47, accept4 288 242, signalfd4 289 74, signalfd 282 -, eventfd2 290 19, epoll_create1 291 20, dup3
292 24, pipe2 293 59, preadv 295 69, pwritev 296 70, prlimit64 302 261, sendmmsg 307 269, recvmmsg 299 243,
getcpu 309 168, renameat2 316 276, getrandom 318 278, statx 332 291, rseq 334 293, pidfd_open 434 434,
pidfd_send_signal 424 424, close_range 436 436, faccessat2 439 439, epoll_pwait2 441 441, membarrier 324 283,
copy_file_range 326 285, sched_getattr 315 275, splice 275 76, tee 276 77, getgroups 115 158, getresuid 118 148,
getresgid 120 150, sync_file_range 277 84, sched_rr_get_interval 148 127, chown 92 -, fchown 93 55, lchown 94 -,
fchownat 260 54, futex_waitv 449 449, socket 41 198, socketpair 53 199, clone 56 220, prctl 157 167, ioctl 16
29, fcntl 72 25, clone3 435 435
"""
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH
ENOSYS, EPERM, ENOMEM, EINVAL, ENOTTY, ENOPROTOOPT, EAFNOSUPPORT = 38, 1, 12, 22, 25, 92, 97
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: word at k; jumps against k
X32 = 0x40000000

NAMESPACES = 0x7E020000  # every CLONE_NEW* that clone takes
UNIX = (1,)
HUGE_PAGES = 0x40000  # MAP_HUGETLB: memory that no memory cgroup counts
# duplicates, flags, locks to take, sizes of pipes; never signals by file, notices, leases, or who holds a lock
FILE_COMMANDS = (0, 1, 2, 3, 4, 6, 7, 37, 38, 1030, 1032, 1034)
# addresses, buffers, timeouts, credentials; never a filter, which is BPF
SOCKET_OPTIONS = (2, 7, 8, 9, 13, 15, 16, 20, 21)
# MADV_MERGEABLE shares pages with strangers, PAGEOUT takes theirs away, the others break memory on purpose
ADVICE = (12, 21, 100, 101)
# terminal questions, FIONREAD, FIONBIO, close-on-exec; never TIOCSTI, which types into a terminal
DEVICE_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# names of threads and mappings, and questions; never the parent-death signal, by which a slot is emptied
PROCESS_OPTIONS = (2, 3, 7, 15, 16, 21, 23, 38, 39, 0x53564D41)
# name: argument, values allowed (or refused), errno otherwise
ONLY = {
    "socket": (0, UNIX, EAFNOSUPPORT),
    "socketpair": (0, UNIX, EAFNOSUPPORT),
    "prctl": (0, PROCESS_OPTIONS, EPERM),
    "ioctl": (1, DEVICE_REQUESTS, ENOTTY),
    "fcntl": (1, FILE_COMMANDS, EPERM),
    "setsockopt": (2, SOCKET_OPTIONS, ENOPROTOOPT),
}
EXCEPT = {"madvise": (2, ADVICE, EINVAL)}
NOT_THESE_BITS = {"clone": (0, NAMESPACES, EPERM), "mmap": (3, HUGE_PAGES, ENOMEM)}
# done at once: a program's own files lie in memory, and others' are not its to flush
NOTHING = ("fsync", "fdatasync", "msync", "sync_file_range", "fadvise64")

Step = tuple[int, int, int, int]  # code, jump if true, jump if false, k


def numbers(machine: str) -> dict[str, int]:
    """Name to number, of the calls on the list that this kind of machine has."""
    column = ARCHITECTURES[machine][0]
    entries = [entry.split() for entry in TABLE.split(",")]
    return {name: int(found[column]) for name, *found in entries if found[column] != "-"}


def assemble(machine: str = "") -> bytes:
    """The filter as an array of `struct sock_filter`."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise HoneError(f"the sandbox has no list of system calls for {machine}: use x86_64 or aarch64")
    known = numbers(machine)
    steps: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[machine][1]), (RETURN, 0, 0, KILL)]
    steps += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    judged = (*ONLY, *EXCEPT, *NOT_THESE_BITS, *NOTHING, "clone3")
    special = {name: number for name, number in known.items() if name in judged}
    for name, number in special.items():
        block = _judge(name)
        steps += [(EQUAL, 0, len(block), number), *block]
    for low, high in _ranges(sorted(set(known.values()) - set(special.values()))):
        steps += [(AT_LEAST, 0, 2, low), (AT_LEAST, 1, 0, high + 1), (RETURN, 0, 0, ALLOW)]
    steps.append((RETURN, 0, 0, ERRNO | ENOSYS))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _judge(name: str) -> list[Step]:
    """The steps that decide about one call by its argument."""
    if name == "clone3":  # its flags lie in memory, where a filter cannot read them; libraries then use clone
        return [(RETURN, 0, 0, ERRNO | ENOSYS)]
    if name in NOTHING:
        return [(RETURN, 0, 0, ERRNO)]
    if name in NOT_THESE_BITS:
        argument, bits, errno = NOT_THESE_BITS[name]
        return [_argument(argument), (ANY_BIT, 0, 1, bits), (RETURN, 0, 0, ERRNO | errno), (RETURN, 0, 0, ALLOW)]
    argument, values, errno = (ONLY | EXCEPT)[name]
    same, other = (ALLOW, ERRNO | errno) if name in ONLY else (ERRNO | errno, ALLOW)
    jumps = [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(argument), *jumps, (RETURN, 0, 0, other), (RETURN, 0, 0, same)]


def _argument(index: int) -> Step:
    return (LOAD, 0, 0, 16 + 8 * index)  # the low half; the kernel reads an int there


def _ranges(found: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers."""
    starts = [n for n in found if n - 1 not in found]
    ends = [n for n in found if n + 1 not in found]
    return list(zip(starts, ends, strict=True))
