//go:build e2e

package vkcocoon_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/transport"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// moment is the first lifetime of the node's certificates.
const moment = 16 * time.Second

// The node's certificates expire all the time. The node is without an API server until both have expired, and for some
// time after. Its guests keep running and are still managed. When the API server is back, the node catches up by
// itself.
func TestExpiryAndAbsence(t *testing.T) {
	refresh := transport.CertCallbackRefreshDuration // client-go checks every five minutes whether its certificate was renewed
	transport.CertCallbackRefreshDuration = 100 * time.Millisecond
	t.Cleanup(func() { transport.CertCallbackRefreshDuration = refresh })
	cluster := kubetest.Up(t, "--extra-config", "controllerManager.controllers=*,-certificatesigningrequest-approving-controller,-certificatesigningrequest-signing-controller")
	kube, err := kubernetes.NewForConfig(cluster.Config)
	if err != nil {
		t.Fatal(err)
	}
	var life atomic.Int64
	life.Store(int64(moment))
	go kubetest.Sign(t.Context(), t, kube, cluster.Authority(t), func() time.Duration { return time.Duration(life.Load()) })
	n := &lone{kube: kube, name: "n1", authority: x509.NewCertPool()}
	n.authority.AddCert(cluster.Authority(t).Leaf)
	n.Node = fakenode.Start(t, fakenode.Options{Name: n.name, Bootstrap: cluster.Bootstrap(t)})
	kubetest.Eventually(t, "the namespace has its account", func() string {
		_, err := kube.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{})
		return fmt.Sprint(err)
	}, "<nil>")
	kubetest.Eventually(t, "the node", func() string { return n.ready(t) }, "True")
	n.create(t, "calm")
	n.create(t, "crashes")
	n.await(t, "calm", "Running true 0")
	n.await(t, "crashes", "Running true 0")
	calm, crashes := n.boot("calm"), n.boot("crashes")

	// Both certificates are renewed, and the next ones work.
	first := n.signed(t, nil)
	second := n.signed(t, first)
	<-time.After(time.Until(first.NotAfter))
	n.create(t, "renewed")
	n.await(t, "renewed", "Running true 0")
	n.signed(t, second)

	// The API server is stopped, and the certificates expire. No request waits then, and none comes soon: its node
	// would wait for the answer to it for a quarter of an hour, as a kubelet does.
	kubetest.Eventually(t, "the requests that are not signed", func() string {
		all, err := kube.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		waiting, newest := 0, map[string]time.Time{}
		for _, r := range all.Items {
			if len(r.Status.Certificate) == 0 {
				waiting++
			}
			if r.CreationTimestamp.After(newest[r.Spec.SignerName]) {
				newest[r.Spec.SignerName] = r.CreationTimestamp.Time
			}
		}
		for signer, last := range newest {
			if time.Since(last) > moment/2 {
				return "the next one to " + signer + " comes soon"
			}
		}
		return strconv.Itoa(waiting)
	}, "0")
	cluster.Stop(t)
	n.Crash(t, contract.VMName("default", "crashes"))
	kubetest.Eventually(t, "the guest that crashed runs again", func() string {
		b := n.boot("crashes")
		return fmt.Sprint(b != "" && b != crashes)
	}, "true")
	<-time.After(moment)
	if cert, why := n.serving(t); cert == nil || why == nil || !cert.NotAfter.After(time.Now()) {
		t.Errorf("with no certificate that is good, %v is served (%v), want one of the node's own", cert, why)
	}
	if n.boot("calm") != calm {
		t.Error("a guest was touched while the API server was away")
	}

	// The API server is back: the node requests new certificates as a new node does, and reports what it could not
	// report before.
	life.Store(int64(time.Hour))
	cluster.Start(t)
	n.await(t, "crashes", "Running true 1")
	n.await(t, "calm", "Running true 0")
	n.create(t, "after")
	n.await(t, "after", "Running true 0")
	kubetest.Eventually(t, "the node", func() string { return n.ready(t) }, "True")
	n.signed(t, second)
	if n.boot("calm") != calm {
		t.Error("a guest was touched when the API server was back")
	}
	if err := kube.CoreV1().Pods("default").DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "guests that run", func() string { return strconv.Itoa(n.Running()) }, "0")
}

// lone is the only node of a cluster.
type lone struct {
	*fakenode.Node
	kube      kubernetes.Interface
	name      string
	authority *x509.CertPool
}

func (n *lone) ready(t *testing.T) string {
	t.Helper()
	node, err := n.kube.CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return string(c.Status)
		}
	}
	return ""
}

func (n *lone) create(t *testing.T, name string) {
	t.Helper()
	if _, err := n.kube.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: n.name, Containers: []corev1.Container{{Name: "a", Image: fakenode.Image}}, TerminationGracePeriodSeconds: new(int64(1))},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// await waits for a pod's phase, whether it is ready, and how often it was restarted.
func (n *lone) await(t *testing.T, name, want string) {
	t.Helper()
	kubetest.Eventually(t, "pod "+name, func() string {
		pod, err := n.kube.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || len(pod.Status.ContainerStatuses) == 0 {
			return fmt.Sprint(err)
		}
		return fmt.Sprintf("%s %t %d", pod.Status.Phase, pod.Status.ContainerStatuses[0].Ready, pod.Status.ContainerStatuses[0].RestartCount)
	}, want)
}

// boot is the boot id of a pod's guest, "" when it does not run.
func (n *lone) boot(pod string) string {
	if g := n.Guest(contract.VMName("default", pod)); g != nil {
		return g.BootID
	}
	return ""
}

// signed waits until the kubelet API serves a cluster-signed certificate other than old.
func (n *lone) signed(t *testing.T, old *x509.Certificate) (cert *x509.Certificate) {
	t.Helper()
	kubetest.Eventually(t, "the serving certificate is another, and signed by the cluster", func() string {
		var why error
		if cert, why = n.serving(t); why == nil && cert.Equal(old) {
			return "the same"
		}
		return fmt.Sprint(why)
	}, "<nil>")
	return cert
}

// serving is the certificate that the kubelet API serves now, and the error if the cluster does not trust it.
func (n *lone) serving(t *testing.T) (*x509.Certificate, error) {
	t.Helper()
	c, err := tls.Dial("tcp", n.Addr(), &tls.Config{InsecureSkipVerify: true}) // verified below
	if err != nil {
		return nil, err
	}
	defer c.Close()
	cert := c.ConnectionState().PeerCertificates[0]
	_, err = cert.Verify(x509.VerifyOptions{DNSName: n.name, Roots: n.authority})
	return cert, err
}
