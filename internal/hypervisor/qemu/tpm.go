package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file gives a guest a TPM. A TPM is a process, swtpm, which is one of the servers of the VM (share.go). It has a user of its own and no
// network, and gets its folder and QEMU's connection as descriptors. It ends when QEMU closes the connection.

const (
	tpmTag = "@tpm" // no shared folder has such a tag
	tpmLog = "swtpm.log"
	tpmDir = "tpm" // in Plan.FirmwareDir if the state is kept, else in Plan.Dir
)

// swtpm finds the program.
func (d *Driver) swtpm() (string, error) {
	bin, err := exec.LookPath(d.cfg.SWTPM)
	if err != nil {
		return "", errdefs.Unavailablef("swtpm is missing, which is the TPM of guests; run `apt-get install swtpm`: %w", err)
	}
	return filepath.Abs(bin)
}

// tpm adds the device of the TPM.
func (c *command) tpm() {
	c.add("-chardev", fmt.Sprintf("socket,id=tpm,fd=%d", c.fd(file{kind: fileShare, path: tpmTag})))
	c.add("-tpmdev", "emulator,id=tpm0,chardev=tpm")
	c.device(props{"driver": "tpm-crb", "id": "crb0", "tpmdev": "tpm0"})
}

// startTPM starts the TPM of the VM.
func (l *launch) startTPM(ctx context.Context) error {
	if l.Plan.TPM == "" {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	bin, err := l.d.swtpm()
	if err != nil {
		return err
	}
	uid, err := l.d.jail.Users.Take(l.Plan.ID + "-tpm")
	if err != nil {
		return err
	}
	l.d.jail.Users.Drop(uid) // the ids of the range are far more than VMs, so nobody else takes it
	state, err := l.tpmState(uid)
	if err != nil {
		return fmt.Errorf("the folder of the TPM: %w", err)
	}
	defer state.Close()
	log, err := l.Dir.AppendTo(tpmLog)
	if err != nil {
		return err
	}
	defer log.Close()
	if err := log.Truncate(0); err != nil {
		return fmt.Errorf("empty the log of the TPM: %w", err)
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("connect the TPM: %w", err)
	}
	ours, its := os.NewFile(uintptr(ends[0]), tpmTag), os.NewFile(uintptr(ends[1]), tpmTag)
	defer its.Close()
	// The name of the process is the mark by which it is found again.
	p, err := proc.Start(proc.Spec{
		Path: bin, Env: []string{"LANG=C"}, Files: []*os.File{its, state}, Out: log, User: &proc.User{UID: uid, GID: uid}, CgroupDir: l.Cgroup.Dir, CgroupTasks: l.Cgroup.Tasks, Isolated: true,
		Args: []string{
			marker(jail.UUID(l.Plan.ID)), "socket", "--tpm2", "--terminate", "--ctrl", "type=unixio,clientfd=" + strconv.Itoa(firstFileFd),
			"--tpmstate", "dir=/proc/self/fd/" + strconv.Itoa(firstFileFd+1) + ",mode=0600",
		},
	})
	if err != nil {
		_ = ours.Close()
		return err
	}
	if len(l.shares) == 0 {
		l.undoServers()
	}
	l.shares = append(l.shares, &server{tag: tpmTag, conn: ours, proc: p})
	return nil
}

// tpmState opens the folder with the state of the TPM, which uid owns. A TPM that is not kept has an empty one.
func (l *launch) tpmState(uid uint32) (*os.File, error) {
	path := filepath.Join(l.Plan.Dir, tpmDir)
	if l.Plan.TPM == vm.TPMPersistent {
		dir, err := l.firmwareDir()
		if err != nil {
			return nil, err
		}
		path = filepath.Join(dir, tpmDir)
	} else if err := atomicfile.RemoveAll(path); err != nil {
		return nil, err
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	dir, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW|os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	// Another start may have had another user. Whatever is in the folder, only entries of the folder itself change.
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		err = errors.Join(err, unix.Fchownat(int(dir.Fd()), name, int(uid), int(uid), unix.AT_SYMLINK_NOFOLLOW))
	}
	if err = errors.Join(err, dir.Chown(int(uid), int(uid))); err != nil {
		_ = dir.Close()
		return nil, err
	}
	return dir, nil
}
