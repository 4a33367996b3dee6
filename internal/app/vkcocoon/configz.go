package vkcocoon

import (
	"encoding/json"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"

	"cocoonstack.io/cocoon/internal/kube/node"
)

// configz serves the settings in force as the kubelet does: under "kubeletconfig" those that a kubelet also has, under
// "vkcocoon" all of the virtual node's. Neither contains secrets.
func (c Config) configz() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(struct {
			Kubelet kubeletconfig.KubeletConfiguration `json:"kubeletconfig"`
			Own     Config                             `json:"vkcocoon"`
		}{c.asKubelet(), c})
	})
}

func (c Config) asKubelet() kubeletconfig.KubeletConfiguration {
	yes, no := true, false
	return kubeletconfig.KubeletConfiguration{
		TypeMeta: metav1.TypeMeta{Kind: "KubeletConfiguration", APIVersion: kubeletconfig.SchemeGroupVersion.String()},
		Address:  c.BindAddress, Port: int32(c.KubeletPort), TLSCertFile: c.TLSCert, TLSPrivateKeyFile: c.TLSKey, ServerTLSBootstrap: c.ServingCSR,
		Authentication: kubeletconfig.KubeletAuthentication{
			X509:      kubeletconfig.KubeletX509Authentication{ClientCAFile: c.ClientCA},
			Webhook:   kubeletconfig.KubeletWebhookAuthentication{Enabled: &yes},
			Anonymous: kubeletconfig.KubeletAnonymousAuthentication{Enabled: &no},
		},
		Authorization: kubeletconfig.KubeletAuthorization{Mode: kubeletconfig.KubeletAuthorizationModeWebhook},
		MaxPods:       int32(c.Pods), ProviderID: c.ProviderID, RegisterWithTaints: []corev1.Taint{node.Taint()},
	}
}
