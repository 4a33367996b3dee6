package aggregated

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// guestOSInfo answers what the guest of an instance tells of itself.
func (s *Server) guestOSInfo(w http.ResponseWriter, r *http.Request, t target) error {
	return s.tell(w, r, t, func(d guest.Description) any {
		out := v1.VirtualMachineInstanceGuestAgentInfo{
			TypeMeta: typeOf(t, "VirtualMachineInstanceGuestAgentInfo"), GAVersion: d.Agent, Hostname: d.Hostname,
			OS: v1.VirtualMachineInstanceGuestOSInfo{
				Name: d.OS.Name, KernelRelease: d.OS.KernelRelease, Version: d.OS.Version, PrettyName: d.OS.PrettyName, VersionID: d.OS.VersionID,
				KernelVersion: d.OS.KernelVersion, Machine: d.OS.Machine, ID: d.OS.ID,
			},
			UserList: users(d), FSInfo: v1.VirtualMachineInstanceFileSystemInfo{Filesystems: fileSystems(d)},
		}
		if d.Timezone.Name != "" {
			out.Timezone = fmt.Sprintf("%s, %d", d.Timezone.Name, d.Timezone.Offset)
		}
		return out
	})
}

// userList answers who is logged in to the guest of an instance.
func (s *Server) userList(w http.ResponseWriter, r *http.Request, t target) error {
	return s.tell(w, r, t, func(d guest.Description) any {
		return v1.VirtualMachineInstanceGuestOSUserList{TypeMeta: typeOf(t, "VirtualMachineInstanceGuestOSUserList"), Items: users(d)}
	})
}

// fileSystemList answers what the guest of an instance has mounted.
func (s *Server) fileSystemList(w http.ResponseWriter, r *http.Request, t target) error {
	return s.tell(w, r, t, func(d guest.Description) any {
		return v1.VirtualMachineInstanceFileSystemList{TypeMeta: typeOf(t, "VirtualMachineInstanceFileSystemList"), Items: fileSystems(d)}
	})
}

// tell asks the guest of an instance, and answers what shape makes of it. Errors: 404, 409 without an agent.
func (s *Server) tell(w http.ResponseWriter, r *http.Request, t target, shape func(guest.Description) any) error {
	d, err := s.described(r.Context(), t)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(shape(d))
}

func (s *Server) described(ctx context.Context, t target) (guest.Description, error) {
	pod, err := s.answering(ctx, t)
	if err != nil {
		return guest.Description{}, err
	}
	return s.guests.describe(ctx, pod)
}

// answering returns the pod of an instance whose guest has an agent that answers. Errors: 404, 409.
func (s *Server) answering(ctx context.Context, t target) (pod types.NamespacedName, err error) {
	vmi, err := s.instance(ctx, t)
	if err != nil {
		return pod, err
	}
	is := func(kind v1.VirtualMachineInstanceConditionType) bool {
		c := kubevirt.Condition(vmi, kind)
		return c != nil && c.Status == "True"
	}
	switch {
	case !vmi.IsRunning():
		return pod, conflict(t, "VMI is not running")
	case is(v1.VirtualMachineInstancePaused):
		return pod, conflict(t, "VMI is paused")
	case !is(v1.VirtualMachineInstanceAgentConnected):
		return pod, conflict(t, "VMI does not have guest agent connected")
	}
	runs, err := s.runningPod(ctx, vmi)
	switch {
	case err != nil:
		return pod, err
	case runs == nil:
		return pod, conflict(t, "VMI is not running: it has no pod that runs")
	}
	return *runs, nil
}

func typeOf(t target, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{Kind: kind, APIVersion: Group + "/" + t.APIVersion}
}

// users never returns nil: the list in the answer is empty then.
func users(d guest.Description) []v1.VirtualMachineInstanceGuestOSUser {
	out := []v1.VirtualMachineInstanceGuestOSUser{}
	for _, u := range d.Users {
		user := v1.VirtualMachineInstanceGuestOSUser{UserName: u.Name, Domain: u.Domain}
		if !u.Since.IsZero() {
			user.LoginTime = float64(u.Since.UnixMicro()) / 1e6
		}
		out = append(out, user)
	}
	return out
}

// fileSystems is to file systems what users is to users.
func fileSystems(d guest.Description) []v1.VirtualMachineInstanceFileSystem {
	out := []v1.VirtualMachineInstanceFileSystem{}
	for _, f := range d.FileSystems {
		fs := v1.VirtualMachineInstanceFileSystem{DiskName: f.Device, MountPoint: f.Path, FileSystemType: f.Type, UsedBytes: int(f.Used), TotalBytes: int(f.Total)}
		for _, k := range f.Disks {
			fs.Disk = append(fs.Disk, v1.VirtualMachineInstanceFileSystemDisk{Serial: k.Serial, BusType: k.Bus})
		}
		out = append(out, fs)
	}
	return out
}
