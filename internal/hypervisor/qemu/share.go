package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file shares folders of the node with a guest. Each folder has a server: a virtiofsd, which reads and writes the folder for the
// guest. The server is root in its own user namespace only. It sees one mount, which has the files of the folder and no others. The server
// ends when QEMU closes the connection. If the server ends first, the guest waits forever, so the driver ends the VM.

const (
	maxTag = 36 // bytes; of virtio

	// idBlock is how many users and groups a server knows: those of the files that it shows and makes.
	idBlock = 1 << 16
	// shareFiles limits the descriptors of a server, which needs one for each file that the guest knows.
	shareFiles = 1 << 20
	shareLog   = "virtiofsd.log"

	shareSocket = "share.sock" // exists only while a server is being connected
)

func checkShares(p hypervisor.Plan) error {
	for i, s := range p.Shares {
		switch {
		case s.Tag == "" || len(s.Tag) > maxTag || strings.ContainsAny(s.Tag, ",="):
			return errdefs.Invalidf("VM %s: invalid tag %q of a shared folder; use 1 to %d bytes without commas", p.Name, s.Tag, maxTag)
		case slices.ContainsFunc(p.Shares[:i], func(o hypervisor.Share) bool { return o.Tag == s.Tag }):
			return errdefs.Invalidf("VM %s: two shared folders have the tag %s", p.Name, s.Tag)
		case s.Live && slices.ContainsFunc(p.Shares[:i], func(o hypervisor.Share) bool { return o.Live }):
			return errdefs.Invalidf("VM %s: two shared folders are live", p.Name)
		case p.Incoming != nil && (!s.Live || !p.Incoming.Alone): // the servers write to the guest's memory
			return errdefs.Invalidf("VM %s has shared folders, so it cannot resume from saved state, except alone and with a live one", p.Name)
		}
	}
	return nil
}

// share adds the connection of Plan.Shares[i], and its device at a place among those of the disks.
func (c *command) share(i, place int, s hypervisor.Share) {
	id := "share" + strconv.Itoa(i)
	if s.Live {
		id = liveShare
	}
	c.add("-chardev", fmt.Sprintf("socket,id=%s,fd=%d", id, c.fd(file{kind: fileShare, path: s.Tag})))
	if !s.Live {
		c.device(props{"driver": "vhost-user-fs-pci", "chardev": id, "id": "virtio-" + id, "tag": s.Tag}.at(slotDisks+place/8, place%8))
	}
}

// server is the process that serves one shared folder, or the TPM.
type server struct {
	tag  string
	path string   // of the folder; "" for a TPM
	conn *os.File // QEMU's end of the connection; nil once QEMU has it
	proc *proc.Process
}

// servers are those of one VM.
type servers []*server

func (s servers) of(tag string) *server {
	return s[slices.IndexFunc(s, func(o *server) bool { return o.tag == tag })]
}

// handles are the servers as the handle of the VM records them.
func (s servers) handles() (out []shareHandle) {
	for _, o := range s {
		out = append(out, shareHandle{Path: o.path, PID: o.proc.PID(), Start: o.proc.StartTime()})
	}
	return out
}

// connected releases QEMU's ends of the connections, which it has inherited.
func (s servers) connected() {
	for _, o := range s {
		if o.conn != nil {
			_ = o.conn.Close()
			o.conn = nil
		}
	}
}

// close releases the processes without ending them.
func (s servers) close() {
	s.connected()
	for _, o := range s {
		_ = o.proc.Close()
	}
}

func (s servers) kill(ctx context.Context) error {
	var errs []error
	for _, o := range s {
		errs = append(errs, o.proc.Kill(ctx))
	}
	return errors.Join(errs...)
}

// shareHandle is what is needed to find a server again.
type shareHandle struct {
	Path  string `json:"path"` // "" for a TPM
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// marker is the argument by which the processes of the servers of a VM are recognized.
func marker(uuid string) string { return "source=" + proc.Mount{Name: uuid}.Path() }

// openServers finds the servers of a running VM again. The error names the first one that has ended.
func openServers(h handle) (found servers, err error) {
	for _, s := range h.Shares {
		p, err := proc.Open(s.PID, s.Start, marker(h.UUID))
		if err != nil {
			found.close()
			return nil, errdefs.NotFoundf("%s", lost(s.Path))
		}
		found = append(found, &server{path: s.Path, proc: p})
	}
	return found, nil
}

// endServers ends those servers of h that still run.
func endServers(ctx context.Context, h handle) error {
	var errs []error
	for _, s := range h.Shares {
		p, err := proc.Open(s.PID, s.Start, marker(h.UUID))
		if err != nil {
			continue // it has ended
		}
		errs = append(errs, p.Kill(ctx), p.Close())
	}
	return errors.Join(errs...)
}

// marked returns the uuid in the marker among args, "" if there is none.
func marked(args []string) string {
	for _, a := range args {
		if uuid, ok := strings.CutPrefix(a, marker("")+"/"); ok {
			return uuid
		}
	}
	return ""
}

func lost(path string) string {
	if path == "" {
		return "the process of its TPM has ended"
	}
	return "the process that shares the folder " + path + " has ended"
}

// watchServers makes the end of a server known.
func (i *instance) watchServers() {
	for _, s := range i.shares {
		go func() {
			<-s.proc.Done() // also when it is closed
			select {
			case i.lost <- lost(s.path):
			default: // the first one counts
			}
		}()
	}
}

// quitTime is how long QEMU, which closes its connections when it ends, may need to end.
const quitTime = time.Second

// abandon ends a VM that has lost a server.
func (i *instance) abandon(ctx context.Context, cause string) {
	wait, cancel := context.WithTimeout(ctx, quitTime)
	defer cancel()
	if _, err := i.Proc.Wait(wait); err == nil || ctx.Err() != nil { // QEMU ended first, or nobody watches any more
		return
	}
	i.d.log.Error("VM ends", "vm", i.h.ID, "err", cause)
	i.mu.Lock()
	i.cause = cause
	i.mu.Unlock()
	if err := i.Proc.Kill(ctx); err != nil {
		i.d.log.Error("VM not ended", "vm", i.h.ID, "err", err)
	}
}

// shareIDs are those of the servers of the VM that has uid: a whole block of the range. Nothing on the host has such an id.
func (d *Driver) shareIDs(uid uint32) (proc.IDs, error) {
	base, err := d.jail.Users.Block(uid, idBlock)
	return proc.IDs{Base: base, Count: idBlock}, err
}

// virtiofsd finds the program; distributions keep it outside of PATH.
func (d *Driver) virtiofsd() (string, error) {
	for _, path := range d.cfg.Virtiofsd {
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", errdefs.Unavailablef("virtiofsd is missing, which shares folders with guests; run `apt-get install qemu-system-common`, or `apt-get install virtiofsd` where that package exists")
}

// share starts the servers of the shared folders, and connects them.
func (l *launch) share(ctx context.Context) error {
	if len(l.Plan.Shares) == 0 {
		return nil
	}
	bin, err := l.d.virtiofsd()
	if err != nil {
		return err
	}
	log, err := l.Dir.AppendTo(shareLog)
	if err != nil {
		return err
	}
	defer log.Close()
	if err := log.Truncate(0); err != nil {
		return fmt.Errorf("empty the log of shared folders: %w", err)
	}
	l.undoServers()
	for _, s := range l.Plan.Shares {
		if err := ctx.Err(); err != nil {
			return err
		}
		srv, err := l.serve(ctx, bin, log, s)
		if err != nil {
			return fmt.Errorf("share the folder %s: %w", s.Path, err)
		}
		l.shares = append(l.shares, srv)
	}
	return nil
}

// undoServers makes a failed launch end the servers.
func (l *launch) undoServers() {
	l.Undo.Push(func(ctx context.Context) error {
		err := l.shares.kill(ctx)
		l.shares.close()
		return err
	})
}

// serve starts one server. The folder is opened once: who replaces it later changes nothing of what the guest has.
func (l *launch) serve(ctx context.Context, bin string, log *os.File, s hypervisor.Share) (*server, error) {
	ids, err := l.d.shareIDs(l.UID)
	if err != nil {
		return nil, err
	}
	tree, err := l.treeOf(s, ids)
	if err != nil {
		return nil, err
	}
	defer tree.Close()
	listener, err := l.Dir.Listen(shareSocket)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	conn, err := jail.Dial(ctx, l.Plan.Dir, shareSocket) // the kernel queues it until the server accepts
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := l.Dir.Remove(shareSocket); err != nil { // nobody else can connect
		return nil, err
	}
	end, err := conn.(*net.UnixConn).File()
	if err != nil {
		return nil, fmt.Errorf("connect its server: %w", err)
	}
	mount := &proc.Mount{Tree: tree, Name: jail.UUID(l.Plan.ID), File: s.File}
	p, err := proc.Start(proc.Spec{
		Path: bin, Env: []string{"LANG=C"}, Files: []*os.File{listener}, Out: log, CgroupDir: l.Cgroup.Dir, CgroupTasks: l.Cgroup.Tasks,
		Args:     []string{filepath.Base(bin), "--fd=" + strconv.Itoa(firstFileFd), "-o", marker(mount.Name), "-o", "sandbox=namespace,cache=auto", "-f", "--rlimit-nofile=0"},
		Isolated: true, Mapped: &ids, Mount: mount,
	})
	if err != nil {
		_ = end.Close()
		return nil, err
	}
	srv := &server{tag: s.Tag, path: s.Path, conn: end, proc: p}
	if err := p.LimitFiles(shareFiles); err != nil {
		srv.conn.Close()
		return nil, errors.Join(err, p.Kill(ctx), p.Close())
	}
	return srv, nil
}

// treeOf returns the mount that the server of s sees. The caller closes it.
func (l *launch) treeOf(s hypervisor.Share, ids proc.IDs) (*os.File, error) {
	if s.Live {
		return proc.LiveTree(s.Path)
	}
	dir, err := hostdir.Open(s.Root, s.Path, s.Create, s.File != "")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return l.d.mapped(l.Plan.ID, dir, ids, s)
}

// shareFault says why a server has ended while QEMU started, nil if none has.
func (l *launch) shareFault(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, s := range l.shares {
		if exit, err := s.proc.Wait(ctx); err == nil && exit.Code != 0 { // with 0 it ended because QEMU did
			name := shareLog
			if s.path == "" {
				name = tpmLog
			}
			words := jail.LastLine(filepath.Join(l.Plan.Dir, name), 0, func(string) bool { return false })
			return errdefs.New(errdefs.Internal, "%s: %s", lost(s.path), words)
		}
	}
	return nil
}

// mapped returns the mount of s, whose folder is dir, for the VM id.
func (d *Driver) mapped(id vm.ID, dir *os.File, ids proc.IDs, s hypervisor.Share) (*os.File, error) {
	tree, err := proc.MappedTree(dir, ids, proc.Tree{ReadOnly: s.ReadOnly, Below: s.Below, ReadOnlyBelow: s.ReadOnlyBelow})
	if s.Below && errdefs.Is(err, errdefs.Unsupported) {
		d.log.Warn("what is mounted below a folder is not shared", "vm", id, "path", s.Path, "err", err)
		return proc.MappedTree(dir, ids, proc.Tree{ReadOnly: s.ReadOnly})
	}
	return tree, err
}
