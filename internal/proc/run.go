package proc

import (
	"context"
	"errors"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Limits bound what a process may take; 0 does not. They count for each process, not for all of them together.
type Limits struct {
	Memory   uint64 // bytes of address space
	CPU      uint64 // seconds of computing
	FileSize uint64 // bytes of any file that it writes
}

// Run runs s to its end. Unlike one that Start started, the process does not outlive the caller: it is killed when ctx
// ends, and by the kernel when the calling process dies. The error of an ended ctx comes with the Exit of the kill.
// Limits are set by prlimit, of util-linux: between fork and exec nothing of ours runs, and later is too late.
func Run(ctx context.Context, s Spec, l Limits) (exit Exit, err error) {
	exit.Code = Unknown
	if err := ctx.Err(); err != nil {
		return exit, err
	}
	if l != (Limits{}) {
		if s, err = l.wrap(s); err != nil {
			return exit, err
		}
	}
	// The kernel takes the death of the thread that forked for that of the parent, so the thread is kept until the end.
	err = OnThread(func() (err error) {
		p, err := s.start(unix.SIGKILL, s.forkHere)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Close()) }()
		if exit, err = p.Wait(ctx); err != nil {
			return errors.Join(err, p.Kill(context.WithoutCancel(ctx)))
		}
		return nil
	})
	return exit, err
}

func (l Limits) wrap(s Spec) (Spec, error) {
	tool, err := exec.LookPath("prlimit")
	if err != nil {
		return s, errdefs.Preconditionf("prlimit is missing, with which %s is kept in bounds; `apt-get install util-linux` brings it", s.Path)
	}
	args := []string{"prlimit", "--core=0"}
	for _, x := range []struct {
		flag  string
		value uint64
	}{{"--as=", l.Memory}, {"--cpu=", l.CPU}, {"--fsize=", l.FileSize}} {
		if x.value > 0 {
			args = append(args, x.flag+strconv.FormatUint(x.value, 10))
		}
	}
	s.Args = append(append(args, "--", s.Path), s.Args[1:]...)
	s.Path = tool
	return s, nil
}
