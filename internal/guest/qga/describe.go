package qga

import (
	"context"
	"errors"
	"math"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

const (
	maxUsers       = 256 // of a description
	maxFileSystems = 256
	maxDisksOfFS   = 16
)

// Describe implements guest.Describer.
func (s *session) Describe(ctx context.Context) (guest.Description, error) {
	var d described
	for _, ask := range []struct {
		command string
		into    any
	}{
		{"guest-info", &d.Agent},
		{"guest-get-host-name", &d.Host},
		{"guest-get-osinfo", &d.OS},
		{"guest-get-timezone", &d.Zone},
		{"guest-get-users", &d.Users},
		{"guest-get-fsinfo", &d.FileSystems},
	} {
		err := s.call(ctx, ask.command, nil, ask.into, answerLimit)
		if refused := new(refusal); err != nil && !errdefs.Is(err, errdefs.Unsupported) && !errors.As(err, &refused) {
			return guest.Description{}, err
		}
	}
	return d.description(), nil
}

// described is a description in the protocol's terms.
type described struct {
	Agent struct {
		Version string `json:"version"`
	}
	Host struct {
		Name string `json:"host-name"`
	}
	OS struct {
		ID            string `json:"id"`
		Name          string `json:"name"`
		PrettyName    string `json:"pretty-name"`
		Version       string `json:"version"`
		VersionID     string `json:"version-id"`
		KernelRelease string `json:"kernel-release"`
		KernelVersion string `json:"kernel-version"`
		Machine       string `json:"machine"`
	}
	Zone struct {
		Name   string `json:"zone"`
		Offset int    `json:"offset"`
	}
	Users []struct {
		Name   string  `json:"user"`
		Domain string  `json:"domain"`
		Since  float64 `json:"login-time"` // seconds since 1970
	}
	FileSystems []struct {
		Name  string `json:"name"`
		Path  string `json:"mountpoint"`
		Type  string `json:"type"`
		Total int64  `json:"total-bytes"`
		Used  int64  `json:"used-bytes"`
		Disks []struct {
			Serial string `json:"serial"`
			Bus    string `json:"bus-type"`
		} `json:"disk"`
	}
}

// description bounds what the guest says, and makes it printable.
func (d described) description() guest.Description {
	out := guest.Description{
		Agent: printable(d.Agent.Version), Hostname: printable(d.Host.Name),
		OS: guest.OS{
			ID: printable(d.OS.ID), Name: printable(d.OS.Name), PrettyName: printable(d.OS.PrettyName), Version: printable(d.OS.Version), VersionID: printable(d.OS.VersionID),
			KernelRelease: printable(d.OS.KernelRelease), KernelVersion: printable(d.OS.KernelVersion), Machine: printable(d.OS.Machine),
		},
	}
	if day := 24 * 60 * 60; d.Zone.Offset > -day && d.Zone.Offset < day {
		out.Timezone = guest.Timezone{Name: printable(d.Zone.Name), Offset: d.Zone.Offset}
	}
	for _, u := range d.Users[:min(len(d.Users), maxUsers)] {
		user := guest.User{Name: printable(u.Name), Domain: printable(u.Domain)}
		if u.Since > 0 && u.Since < math.MaxUint32 {
			user.Since = time.UnixMicro(int64(u.Since * 1e6)).UTC()
		}
		out.Users = append(out.Users, user)
	}
	for _, f := range d.FileSystems[:min(len(d.FileSystems), maxFileSystems)] {
		fs := guest.FileSystem{Device: printable(f.Name), Path: printable(f.Path), Type: printable(f.Type)}
		if f.Used >= 0 && f.Used <= f.Total {
			fs.Total, fs.Used = f.Total, f.Used
		}
		for _, k := range f.Disks[:min(len(f.Disks), maxDisksOfFS)] {
			fs.Disks = append(fs.Disks, guest.FileSystemDisk{Serial: printable(k.Serial), Bus: printable(k.Bus)})
		}
		out.FileSystems = append(out.FileSystems, fs)
	}
	return out
}
