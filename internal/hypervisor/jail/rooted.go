package jail

import (
	"context"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
)

// RootedFile is a file of the node that a process with a root of its own (proc.Root) finds there.
type RootedFile struct {
	At       string // path in the root
	Path     string // on the node
	Root     string // the folder below which Path has no symbolic links, "" for a file of ours
	ReadOnly bool
}

// Rooted is what the launches have in common whose process has a root of its own and is told over an API what its VM is.
type Rooted struct {
	Launch

	Title   string // of the program
	Files   []RootedFile
	Console Console
	Root    []proc.RootFile // with open files
}

// OpenRoot makes the private folder of the process, which finds it at the path at, and opens the files. The folder is the first one of l.Root.
func (l *Rooted) OpenRoot(at string) error {
	l.Undo.Push(func(context.Context) error { return l.Jail.RemoveSockets(l.Plan.Dir) })
	private, err := NewPrivate(l.UID)
	if err != nil {
		return err
	}
	l.Root = append(l.Root, proc.RootFile{At: at, File: private, Scratch: true})
	for _, f := range l.Files {
		file, err := OpenData(f.Path, f.Root, !f.ReadOnly)
		if err != nil {
			return err
		}
		l.Root = append(l.Root, proc.RootFile{At: f.At, File: file, ReadOnly: f.ReadOnly})
	}
	return nil
}

// Release closes what only the launch needs.
func (l *Rooted) Release() {
	for _, f := range l.Root {
		_ = f.File.Close()
	}
	l.Console.Close()
	l.Cgroup.Close()
	_ = l.Dir.Close()
}

// Refused is the error of a program that has refused a request with err.
func (l *Rooted) Refused(err error) error {
	return l.damaged(errdefs.New(errdefs.Internal, "%s", l.onNode(err.Error())))
}

// Explain replaces err, the loss of the connection to the program, by what the program says last if it has ended.
func (l *Rooted) Explain(ctx context.Context, err error, last func() string) error {
	if ctx.Err() != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, time.Second) // it hung up, so its process ends soon
	defer cancel()
	exit, werr := l.Proc.Wait(wait)
	if werr != nil {
		return err
	}
	why := last()
	if why == "" {
		why = "it logged no message"
	}
	return l.damaged(errdefs.New(errdefs.Internal, "%s ended while it started, with code %d, signal %d: %s", l.Title, exit.Code, exit.Signal, l.onNode(why)))
}

// damaged makes err, by which a process did not start, DataLoss if it should have resumed.
func (l *Rooted) damaged(err error) error {
	if l.Plan.Incoming == nil {
		return err
	}
	return errdefs.DataLossf("it does not resume from the saved state %s: %w", l.Plan.Incoming.State, err)
}

// onNode replaces paths in the root by those on the node.
func (l *Rooted) onNode(s string) string {
	var pairs []string
	for _, f := range l.Files {
		pairs = append(pairs, f.At, f.Path)
	}
	return strings.NewReplacer(pairs...).Replace(s)
}
