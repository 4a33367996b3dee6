package datavolume

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/volume"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/upload"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func claim(phase corev1.PersistentVolumeClaimPhase, node string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "disk"}, Status: corev1.PersistentVolumeClaimStatus{Phase: phase}}
	if node != "" {
		c.Annotations = map[string]string{volume.AnnSelectedNode: node}
	}
	return c
}

func annotated(key, value string) *corev1.PersistentVolumeClaim {
	c := claim(corev1.ClaimPending, "")
	c.Annotations = map[string]string{key: value}
	return c
}

func TestDecide(t *testing.T) {
	later := storagev1.VolumeBindingWaitForFirstConsumer
	waits := &storagev1.StorageClass{VolumeBindingMode: &later}
	blank, copied := &v1beta1.DataVolumeSource{Blank: &v1beta1.DataVolumeBlankImage{}}, &v1beta1.DataVolumeSource{PVC: &v1beta1.DataVolumeSourcePVC{Name: "a"}}
	uploaded := &v1beta1.DataVolumeSource{Upload: &v1beta1.DataVolumeSourceUpload{}}
	for name, c := range map[string]struct {
		was    v1beta1.DataVolumePhase
		source *v1beta1.DataVolumeSource
		x      seen
		want   string // phase, progress, claim, restarts, Bound, Ready, Running and its reason
	}{
		"new":                   {"", blank, seen{}, "Pending N/A  0 False False False Pending"},
		"refused":               {"", blank, seen{refusal: "no"}, "Failed N/A  0 False False False NotSupported"},
		"of others":             {"", blank, seen{claim: claim(corev1.ClaimBound, "")}, "Pending N/A  0 False False False ErrResourceExists"},
		"without a consumer":    {v1beta1.Pending, blank, seen{claim: claim(corev1.ClaimPending, ""), mine: true, class: waits}, "WaitForFirstConsumer N/A disk 0 False False False WaitForFirstConsumer"},
		"without room":          {v1beta1.Pending, blank, seen{claim: claim(corev1.ClaimPending, ""), mine: true, class: waits, note: "full"}, "WaitForFirstConsumer N/A disk 0 False False False NoNodeWithRoom"},
		"on a node":             {v1beta1.Pending, blank, seen{claim: claim(corev1.ClaimPending, "a"), mine: true, class: waits}, "ImportInProgress N/A disk 0 False False True ImportInProgress"},
		"a copy":                {v1beta1.Pending, copied, seen{claim: claim(corev1.ClaimPending, "a"), mine: true, class: waits}, "CloneInProgress N/A disk 0 False False True CloneInProgress"},
		"of an immediate class": {v1beta1.Pending, blank, seen{claim: claim(corev1.ClaimPending, ""), mine: true, class: &storagev1.StorageClass{}}, "ImportInProgress N/A disk 0 False False True ImportInProgress"},
		"half done":             {v1beta1.ImportInProgress, blank, seen{claim: claim(corev1.ClaimPending, "a"), mine: true, class: waits, progress: 50}, "ImportInProgress 50.0% disk 0 False False True ImportInProgress"},
		"that fails":            {v1beta1.ImportInProgress, blank, seen{claim: claim(corev1.ClaimPending, "a"), mine: true, class: waits, failure: "boom", failures: 3}, "ImportInProgress N/A disk 3 False False False Error"},
		"not offered yet":       {v1beta1.Pending, uploaded, seen{claim: claim(corev1.ClaimPending, "a"), mine: true, class: waits}, "UploadScheduled N/A disk 0 False False False UploadScheduled"},
		"refused to take":       {v1beta1.Pending, uploaded, seen{claim: claim(corev1.ClaimPending, ""), mine: true, class: waits, failure: "no", failures: 1}, "UploadScheduled N/A disk 1 False False False Error"},
		"to be uploaded":        {v1beta1.UploadScheduled, uploaded, seen{claim: annotated(upload.AnnReady, "true"), mine: true, class: waits}, "UploadReady N/A disk 0 False False False UploadReady"},
		"that was uploaded":     {v1beta1.UploadReady, uploaded, seen{claim: annotated(contract.KeyVolumeUpload, "sha256:1"), mine: true, class: waits}, "WaitForFirstConsumer N/A disk 0 False False False WaitForFirstConsumer"},
		"bound":                 {v1beta1.ImportInProgress, blank, seen{claim: claim(corev1.ClaimBound, "a"), mine: true}, "Succeeded 100.0% disk 0 True True False Completed"},
		"lost":                  {v1beta1.Succeeded, blank, seen{claim: claim(corev1.ClaimLost, "a"), mine: true}, "Failed 100.0%  0 False False False ClaimLost"},
		"deleted":               {v1beta1.Succeeded, blank, seen{}, "Failed 100.0%  0 False False False ClaimLost"},
	} {
		x := c.x
		x.now, x.dv = now, &v1beta1.DataVolume{Spec: v1beta1.DataVolumeSpec{Source: c.source}, Status: v1beta1.DataVolumeStatus{Phase: c.was}}
		if c.was == v1beta1.Succeeded {
			x.dv.Status.Progress = whole
		}
		got := decide(x)
		text := fmt.Sprint(got.Phase, " ", got.Progress, " ", got.ClaimName, " ", got.RestartCount)
		for _, kind := range []v1beta1.DataVolumeConditionType{v1beta1.DataVolumeBound, v1beta1.DataVolumeReady, v1beta1.DataVolumeRunning} {
			for _, is := range got.Conditions {
				if is.Type != kind {
					continue
				}
				text += " " + string(is.Status)
				if kind == v1beta1.DataVolumeRunning {
					text += " " + is.Reason
				}
			}
		}
		if text != c.want {
			t.Errorf("%s: %s, want %s", name, text, c.want)
		}
		x.dv.Status, x.now = got, now.Add(time.Hour)
		if d := diff.Of(got, decide(x)); d != "" {
			t.Errorf("%s: the next look changes the status: %s", name, d)
		}
	}
}

func TestAttempts(t *testing.T) {
	event := func(reason, text string, count int32, after time.Duration) corev1.Event {
		e := corev1.Event{Reason: reason, Message: text, Count: count, LastTimestamp: metav1.NewTime(now.Add(after))}
		if reason == "Filling" {
			e.Annotations = map[string]string{contract.KeyVolumeProgress: text}
		}
		return e
	}
	for name, c := range map[string]struct {
		events []corev1.Event
		want   string // failure, how many, progress
	}{
		"none":       {nil, " 0 0"},
		"begun":      {[]corev1.Event{event("Provisioning", "", 1, 0)}, " 0 0"},
		"half done":  {[]corev1.Event{event("Filling", "50", 1, time.Minute), event("Provisioning", "", 1, 0), event("Filling", "20", 1, time.Second)}, " 0 50"},
		"all done":   {[]corev1.Event{event("Provisioning", "", 1, 0), event("Filling", "100", 1, time.Second)}, " 0 99"},
		"nonsense":   {[]corev1.Event{event("Filling", "many", 1, 0), event("Filling", "-7", 1, 0)}, " 0 0"},
		"failed":     {[]corev1.Event{event("Provisioning", "", 1, 0), event("Filling", "20", 1, 0), event("ProvisioningFailed", "boom", 0, time.Second)}, "boom 1 0"},
		"at once":    {[]corev1.Event{event("Provisioning", "", 1, 0), event("ProvisioningFailed", "boom", 0, 0)}, "boom 1 0"},
		"twice":      {[]corev1.Event{event("ProvisioningFailed", "new", 2, time.Minute), event("Provisioning", "", 3, time.Minute), event("ProvisioningFailed", "old", 3, 0)}, "new 5 0"},
		"once again": {[]corev1.Event{event("Filling", "20", 1, -time.Second), event("ProvisioningFailed", "boom", 2, 0), event("Provisioning", "", 3, time.Minute)}, " 2 0"},
		"others":     {[]corev1.Event{event("ProvisioningFailed", "boom", 1, 0), event("ExternalProvisioning", "", 3, time.Minute)}, "boom 1 0"},
	} {
		var x seen
		x.attempts(c.events)
		if got := fmt.Sprint(x.failure, " ", x.failures, " ", x.progress); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
