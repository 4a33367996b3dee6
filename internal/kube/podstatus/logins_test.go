package podstatus

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// A pod has the condition from when its guest has its logins, or has refused them, also when its node's program starts anew.
func TestLogins(t *testing.T) {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a"}}}}
	rec := &vm.Record{ID: "v", State: vm.StateRunning, ImageType: vm.ImageDisk}
	var s corev1.PodStatus
	for _, c := range []struct {
		is   Logins
		want string
	}{
		{Logins{}, ""},
		{Logins{Known: true, Failure: "no such user"}, "False FailedLogins no such user"},
		{Logins{}, "False FailedLogins no such user"},
		{Logins{Known: true}, "True LoginsSet "},
		{Logins{}, "True LoginsSet "},
	} {
		s = View{Pod: p, Record: rec, IP: "10.0.0.2", Logins: c.is}.Status(s, time.Unix(1, 0))
		got := ""
		for _, x := range s.Conditions {
			if x.Type == contract.ConditionLogins {
				got = string(x.Status) + " " + x.Reason + " " + x.Message
			}
		}
		if got != c.want {
			t.Errorf("%+v: %q, want %q", c.is, got, c.want)
		}
	}
}
