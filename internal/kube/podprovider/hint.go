package podprovider

import (
	"encoding/base64"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/postclone"
	"cocoonstack.io/cocoon/internal/vm"
)

// hintDelay is how long a clone may take to set up its identity before a person is asked to help. An agent answers much
// sooner.
const hintDelay = 30 * time.Second

// hintAfter returns when to check whether rec needs a hint.
func hintAfter(rec *vm.Record) turn {
	if !estranged(rec) {
		return whenWoken
	}
	if left := time.Until(rec.StartedAt.Add(hintDelay)); left > 0 {
		return after(left)
	}
	return whenWoken
}

// hint returns the commands that a person must run in the guest, in base64; "" when nothing must be run. known is false
// when there is nothing to say about it.
func (r *report) hint(f facts) (text string, known bool) {
	if f.rec == nil || f.rec.Snapshot == "" && f.pod.Annotations[contract.KeyPostCloneHint] == "" {
		return "", false
	}
	if !estranged(f.rec) || r.health.Reach().Ready || time.Since(f.rec.StartedAt) < hintDelay {
		return "", true
	}
	commands := hintCommands(f.rec)
	if commands == "" {
		return "", true
	}
	return base64.StdEncoding.EncodeToString([]byte(commands)), true
}

// sayHint reports a hint once.
func (r *report) sayHint(hint string) {
	if hint == r.hinted {
		return
	}
	if r.hinted = hint; hint == "" {
		return
	}
	r.event(corev1.EventTypeWarning, eventHint, "VM %s was cloned, but no agent in it answers; open `cocoon vm console %s` and run the commands of the annotation %s (base64); then the VM becomes ready",
		r.vmName, r.vmName, contract.KeyPostCloneHint)
	r.log.Warn("identity of cloned guest must be set by hand", "vm", r.vmName)
}

// hintCommands returns the commands that give rec its own identity.
func hintCommands(rec *vm.Record) string {
	facts := postclone.Facts{Hypervisor: rec.Driver, ImageType: rec.ImageType, Image: rec.Spec.Image}
	for i, nic := range rec.NICs {
		facts.StaticNIC = facts.StaticNIC || nic.IP != "" && !nic.DHCP
		facts.FixedMAC = facts.FixedMAC || i < len(rec.Resume.MACs) && !strings.EqualFold(rec.Resume.MACs[i], nic.MAC)
	}
	text, err := postclone.Commands(postclone.Classify(facts), postclone.Clone{
		ID: rec.ID, Hostname: rec.Spec.Hostname, NICs: rec.NICs, MACs: rec.Resume.MACs, MachineID: rec.Resume.MachineID,
	})
	if err != nil {
		return ""
	}
	return text
}
