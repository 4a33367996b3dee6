// Package install writes Cocoon OS to a disk of a machine that was started from the installer.
//
// It writes what makes the disk start at the very end, by one write that changes one sector, after everything else has been read back: whenever it is cut off, the
// machine's firmware finds nothing there that starts, and the disk can be installed again. It serves nothing.
package install

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Phases of an installation, in their order. The names are the documented ones.
const (
	Verify    = "verify"
	Partition = "partition"
	WriteBoot = "write_boot"
	PatchBoot = "patch_boot"
	SlotA     = "write_slot_a"
	SlotB     = "write_slot_b"
	InitLVM   = "init_lvm"
	SealPhase = "seal_firstboot"
	Sync      = "sync"
	Done      = "done"
)

// Config configures an Installer.
type Config struct {
	Root      disk.Root // what the installer was started from
	SysBlock  string    // the kernel's disks
	Dev       string
	BootDir   string              // where the boot partition of the installer is mounted
	LoaderDir string              // the boot loader of installed machines and its configuration
	StateDir  string              // files of the network that the installed machine takes over
	WorkDir   string              // for mounts
	SlotMiB   int64               // of installed machines
	Keys      []ed25519.PublicKey // that sign the system
	Arch      string              // as Go calls it
	Open      bool                // the person at the console said that data may be overwritten without the code
	Run       disk.Run
	Log       *slog.Logger
}

// Request is what an operator wants.
type Request struct {
	Target    string // "": the only disk that is possible
	Operator  []byte // public key of Ed25519
	Name      string // of the operator
	Seal      bool   // the machine comes up adopted by the operator
	Reinstall bool   // data on the disk may be overwritten
	Code      string // of the console
}

// Result is what was installed.
type Result struct {
	Seal identity.Seal // without Request.Seal, the machine makes an identity of its own
	Kid  string        // of the operator's key; "": nobody has adopted the machine
}

// Progress is told how far a phase is, in percent.
type Progress func(phase string, percent uint32, message string)

// Installer installs the system once. Safe for concurrent use.
type Installer struct {
	cfg  Config
	seal identity.Seal
	code string
	work func(context.Context, Disk, Request, identity.Seal, Progress) error

	mu      sync.Mutex
	running bool
	last    *Request // that was carried out
	result  Result
}

// New returns an Installer for the machine that will be the one of seal. It writes nothing.
func New(cfg Config, seal identity.Seal) *Installer {
	i := &Installer{cfg: cfg, seal: seal, code: newCode()}
	i.work = i.write
	return i
}

const (
	codeLetters = "ABCDEFGHJKMNPQRSTUVWXYZ23456789" // none of them looks like another one
	codeLength  = 10                                // 49 bits: nobody guesses it over a network, so guesses need no limit that a stranger could use up
)

func newCode() string {
	b := make([]byte, 0, codeLength)
	for len(b) < codeLength {
		var one [1]byte
		_, _ = rand.Read(one[:]) // it never fails
		if n := int(one[0] & 31); n < len(codeLetters) {
			b = append(b, codeLetters[n])
		}
	}
	return string(b)
}

// Code is what the person at the console knows, and whoever wants to overwrite data must, too. It is for people: in two parts.
func (i *Installer) Code() string { return i.code[:codeLength/2] + "-" + i.code[codeLength/2:] }

// Open reports whether data may be overwritten without the code.
func (i *Installer) Open() bool { return i.cfg.Open }

// Seal returns the identity of the machine.
func (i *Installer) Seal() identity.Seal { return i.seal }

// Installed reports whether the one installation took place.
func (i *Installer) Installed() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.last != nil
}

// Disks returns the disks on which the system can be installed. Errors: FailedPrecondition if there is none.
func (i *Installer) Disks() ([]Disk, error) {
	all, _, err := i.disks()
	return all, err
}

func (i *Installer) disks() ([]Disk, []string, error) {
	own, _, err := i.cfg.Root.Find(i.cfg.SysBlock, i.cfg.Dev)
	if err != nil {
		return nil, nil, fmt.Errorf("find the disk of the installer: %w", err)
	}
	all, others, err := candidates(i.cfg.SysBlock, i.cfg.Dev, own)
	if err == nil && len(all) == 0 {
		err = errdefs.Preconditionf("the machine has no disk of at least 16 GiB that is neither removable nor in use, besides that of the installer")
	}
	return all, others, err
}

// Install carries out a request. It ends early with ctx, but not once the disk starts. The same request again gives the same result.
// Errors: InvalidArgument (disk, key, code), FailedPrecondition (data without Reinstall or code, another system, installed already), Conflict while another one runs, DataLoss.
func (i *Installer) Install(ctx context.Context, r Request, progress Progress) (Result, error) {
	seal, key, err := i.seal.For(r.Operator, r.Name)
	if err != nil && (r.Seal || len(r.Operator) > 0) {
		return Result{}, err
	}
	if done, err := i.begin(r); done != nil || err != nil {
		if done != nil {
			progress(Done, 100, "it was installed before")
			return *done, nil
		}
		return Result{}, err
	}
	result := Result{Seal: seal}
	if r.Seal {
		result.Kid = key.Kid()
	}
	d, err := i.target(r)
	if err == nil {
		i.cfg.Log.Info("installing", "device", d.Path, "holds", d.Holds, "kid", result.Kid)
		err = i.work(ctx, d, r, seal, progress)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.running = false
	if err != nil {
		i.cfg.Log.Error("not installed", "device", d.Path, "err", err)
		return Result{}, err
	}
	i.last, i.result = &r, result
	i.cfg.Log.Info("installed", "device", d.Path)
	return result, nil
}

// begin takes the turn of the request, or returns the result that it had before.
func (i *Installer) begin(r Request) (*Result, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.running:
		return nil, errdefs.Conflictf("an installation is running")
	case i.last == nil:
		i.running = true
		return nil, nil //nolint:nilnil // neither: it is its turn
	case i.last.Target == r.Target && i.last.Seal == r.Seal && slices.Equal(i.last.Operator, r.Operator):
		return &i.result, nil
	}
	return nil, errdefs.Preconditionf("the system was installed on this machine; take the installer out and restart it")
}

// target returns the disk of a request, if it may be overwritten.
func (i *Installer) target(r Request) (Disk, error) {
	all, others, err := i.disks()
	if err != nil {
		return Disk{}, err
	}
	at := slices.IndexFunc(all, func(d Disk) bool { return d.Path == r.Target || r.Target == "" })
	switch {
	case r.Target == "" && len(all) > 1:
		return Disk{}, errdefs.Invalidf("the machine has %d disks; choose one of %s", len(all), paths(all))
	case at < 0:
		return Disk{}, errdefs.Invalidf("the system cannot be installed on %.64q; choose one of %s", r.Target, paths(all))
	}
	d := all[at]
	for _, other := range others {
		if other != d.Path {
			return Disk{}, errdefs.Preconditionf("%s has a Cocoon OS, and a machine with two would not start; install on %s, or take it out", other, other)
		}
	}
	return d, i.allow(d, r)
}

// allow refuses to overwrite data without a proof that somebody at the machine wants it.
func (i *Installer) allow(d Disk, r Request) error {
	given := strings.Map(func(c rune) rune {
		if c == '-' || c == ' ' {
			return -1
		}
		return c
	}, strings.ToUpper(r.Code))
	right := subtle.ConstantTimeCompare([]byte(given), []byte(i.code)) == 1
	switch {
	case given != "" && !right:
		return errdefs.Invalidf("the code is not the one that the machine shows on its console")
	case d.Holds == "" || i.cfg.Open || r.Reinstall && right:
		return nil
	case !r.Reinstall:
		return errdefs.Preconditionf("%s holds %s, which would be lost; if nobody needs it: capsulectl install --reinstall", d.Path, d.Holds)
	}
	return errdefs.Preconditionf("%s holds %s; give the code that the machine shows on its console, or choose at its start that data may be overwritten", d.Path, d.Holds)
}

func paths(all []Disk) string {
	var names []string
	for _, d := range all {
		names = append(names, d.Path)
	}
	return strings.Join(names, ", ")
}

// phase names what failed.
func phase(name string, err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%s: %w", name, err)
}
