package proc

import (
	"context"
	"errors"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Limits bound what a process may use; 0 means no limit. They apply to each process, not to the sum of all processes.
type Limits struct {
	Memory   uint64 // bytes of address space
	CPU      uint64 // seconds of CPU time
	FileSize uint64 // bytes of any file that it writes
}

// Run runs s to its end. Unlike a process that Start started, this one does not outlive the caller: Run kills it when ctx ends,
// and the kernel kills it when the calling process dies. The error of an ended ctx comes with the Exit of the kill. prlimit of
// util-linux sets the limits: none of our code runs between fork and exec, and after exec is too late.
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
	// For the kernel the parent is the thread that forked, so this thread must live until the process ends.
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
		return s, errdefs.Preconditionf("prlimit is missing, which limits %s; run `apt-get install util-linux`", s.Path)
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
