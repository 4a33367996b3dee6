package chunked

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// PullEarly implements snapshot.Remote. Memory comes later by a process of its own, which outlives this one as long as a guest waits for it: it alone then has the credentials.
func (c *Client) PullEarly(ctx context.Context, ref, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, func(context.Context), error) {
	var out snapshot.Snapshot
	var arrive func(context.Context)
	err := c.session(ctx, ref, auth, ociclient.Pull, func(r ociclient.Ref, s *ociclient.Session) (err error) {
		p := &pull{c: c, s: s, m: &meter{s: s, tell: progress}, held: map[string]snapshot.Held{}, tables: map[string]*pages{}}
		if out, arrive, err = p.runEarly(ctx, r, name, ref, auth); err != nil {
			return fmt.Errorf("pull %s: %w", r, full(err))
		}
		return nil
	})
	return out, arrive, err
}

func (p *pull) runEarly(ctx context.Context, r ociclient.Ref, name, ref string, auth snapshot.Auth) (_ snapshot.Snapshot, _ func(context.Context), err error) {
	none := snapshot.Snapshot{}
	draft, record, err := p.begin(ctx, r, name)
	if err != nil {
		return none, nil, err
	}
	p.early = p.c.cfg.LoadsLate == nil || p.c.cfg.LoadsLate(record.Hypervisor)
	arrives := false
	defer func() {
		if !arrives {
			p.end(draft)
		}
	}()
	if err := p.fetch(ctx); err != nil {
		return none, nil, err
	}
	if len(p.later) == 0 {
		s, err := p.finish(ctx, r, draft, record)
		return s, func(context.Context) {}, err
	}
	a := &arrival{pull: p, draft: draft, record: record, r: r}
	if err := a.start(ctx, loadJob{Ref: ref, Auth: auth, HTTP: p.c.cfg.HTTP, Size: p.file(snapshot.FileMemory).size, Chunks: chunksOf(p.later)}); err != nil {
		return none, nil, err
	}
	s, err := draft.Offer(ctx, record)
	if err != nil {
		a.abandon(ctx) // nobody has found the socket
		return none, nil, err
	}
	arrives = true
	p.m.tell = nil // whoever asked has got an answer
	return s, a.arrive, nil
}

func (p *pull) file(name string) *incoming {
	at := slices.IndexFunc(p.files, func(f incoming) bool { return f.name == name })
	if at < 0 {
		return nil
	}
	return &p.files[at]
}

// postpone takes out of tasks what only the memory needs and nothing local has, if memory can come in parts.
func (p *pull) postpone(tasks []task) (now []task) {
	memory := p.file(snapshot.FileMemory)
	if memory == nil || !memory.paged() || p.c.cfg.HTTP.Reach != nil {
		return tasks
	}
	for _, t := range tasks {
		_, local := p.local[t.layer.Digest]
		other := slices.ContainsFunc(t.targets, func(to target) bool { return to.f != p.open[snapshot.FileMemory] })
		if t.whole != nil || local || other {
			now = append(now, t)
		} else {
			p.later = append(p.later, t)
		}
	}
	return now
}

func chunksOf(tasks []task) (out []loadChunk) {
	for _, t := range tasks {
		c := loadChunk{Layer: ociclient.Descriptor{MediaType: t.layer.MediaType, Digest: t.layer.Digest, Size: t.layer.Size}, Length: t.length}
		for _, to := range t.targets {
			c.Parts = append(c.Parts, to.Range)
		}
		out = append(out, c)
	}
	return out
}

// arrival is a snapshot whose memory a process of its own loads.
type arrival struct {
	pull   *pull
	draft  snapshot.Draft
	record snapshot.Snapshot
	r      ociclient.Ref

	loader *proc.Process
	keep   *os.File // the process goes on while this is open, and then only for guests
	says   *os.File
}

// start starts the process that loads the memory.
func (a *arrival) start(ctx context.Context, job loadJob) (err error) {
	if err = a.launch(); err == nil {
		err = a.instruct(ctx, job)
	}
	if err != nil {
		a.abandon(ctx)
		return fmt.Errorf("start what loads the memory: %w", err)
	}
	return nil
}

// launch starts the process. On return nobody but the process has its ends of the pipes, so what waits for it sees its end.
func (a *arrival) launch() error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	memory, err := os.OpenFile(filepath.Join(a.draft.Dir(), snapshot.FileMemory), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	files = append(files, memory)
	feed, err := listen(a.draft.Dir())
	if err != nil {
		return err
	}
	files = append(files, feed)
	said, say, err := os.Pipe()
	if err != nil {
		return err
	}
	files, a.says = append(files, say), said
	in, keep, err := os.Pipe()
	if err != nil {
		return err
	}
	files, a.keep = append(files, in), keep
	self, err := os.Executable()
	if err != nil {
		return err
	}
	a.loader, err = proc.Start(proc.Spec{Path: self, Args: []string{"cocoon-load-memory", LoadCommand}, Env: a.environment(), In: in, Files: files[:3], User: a.pull.c.cfg.LoadAs})
	return err
}

// instruct tells the process what to load. It may not read all of it, or not at all.
func (a *arrival) instruct(ctx context.Context, job loadJob) error {
	defer context.AfterFunc(ctx, func() { _ = a.keep.SetWriteDeadline(time.Unix(1, 0)) })()
	err := json.NewEncoder(a.keep).Encode(job)
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// environment is what a process needs to reach a registry as this one does.
func (a *arrival) environment() (out []string) {
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		switch strings.ToUpper(name) {
		case "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR":
			out = append(out, e)
		}
	}
	return out
}

// listen makes the socket snapshot.FileFeed in dir, which only root reaches.
func listen(dir string) (*os.File, error) {
	at, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(at) }()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", at, snapshot.FileFeed)})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	return l.File()
}

// release lets the process go, which then ends when no guest waits for it.
func (a *arrival) release() {
	_ = a.keep.Close()
	_ = a.says.Close()
	if a.loader != nil {
		_ = a.loader.Close()
	}
}

// abandon ends the process. No guest waits for it.
func (a *arrival) abandon(ctx context.Context) {
	if a.loader != nil {
		if err := a.loader.Kill(context.WithoutCancel(ctx)); err != nil {
			a.pull.c.cfg.Log.Warn("what loads the memory does not end", "snapshot", a.draft.ID(), "err", err)
		}
	}
	a.release()
}

// arrive is what PullEarly returns. It returns when the process has ended, which needs no guest then, or with ctx.
func (a *arrival) arrive(ctx context.Context) {
	defer a.release()
	if err := a.wait(ctx); err != nil {
		a.pull.c.cfg.Log.Error("snapshot does not arrive, it is removed", "snapshot", a.draft.ID(), "err", err)
	}
	_, _ = a.loader.Wait(ctx) // guests may still copy, or wait if this one has given up
}

// wait waits until the memory is here, and stores the snapshot, or removes it. Then it lets the process go.
func (a *arrival) wait(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = a.says.Close() })()
	err := a.loaded()
	if err == nil {
		err = a.store(ctx)
	}
	a.pull.end(a.draft)
	_, _ = a.keep.Close(), a.says.Close()
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("pull %s: %w", a.r, full(err))
	}
	a.pull.c.cfg.Log.Info("snapshot arrived", "snapshot", a.draft.ID())
	return nil
}

// loaded waits until the process has loaded all.
func (a *arrival) loaded() error {
	for in := bufio.NewScanner(a.says); in.Scan(); {
		var s loadSays
		if err := json.Unmarshal(in.Bytes(), &s); err != nil {
			return errdefs.New(errdefs.Internal, "what loads the memory says nonsense: %w", err)
		}
		switch {
		case s.Whole:
			return nil
		case s.Waits:
			a.pull.c.cfg.Log.Warn("memory of a snapshot not loaded, its guests wait", "snapshot", a.draft.ID(), "err", s.Error)
		default:
			class, _ := errdefs.ClassNamed(s.Class)
			return errdefs.New(class, "%s", s.Error)
		}
	}
	return errdefs.Unavailablef("what loads its memory has ended before all of it was here")
}

// store verifies and stores the snapshot.
func (a *arrival) store(ctx context.Context) error {
	if t := a.pull.tables[snapshot.FileMemory]; t != nil {
		f, err := os.Open(filepath.Join(a.draft.Dir(), snapshot.FileMemory))
		if err != nil {
			return err
		}
		defer f.Close()
		for _, task := range a.pull.later {
			for _, to := range task.targets {
				if err := hash(ctx, t, f, to.Range); err != nil {
					return err
				}
			}
		}
	}
	_, err := a.pull.finish(ctx, a.r, a.draft, a.record)
	return err
}

func hash(ctx context.Context, t *pages, f io.ReaderAt, r artifact.Range) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	buf := make([]byte, r.Length)
	if _, err := f.ReadAt(buf, r.Offset); err != nil {
		return err
	}
	t.put(r.Offset, buf)
	return nil
}
